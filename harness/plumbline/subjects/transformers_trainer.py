"""The Hugging Face Trainer: its sampling, accumulation, clipping, precision and checkpoints."""

import tempfile
from dataclasses import fields

from torch.utils.data import SequentialSampler

from plumbline.subjects.declare import CAPABILITIES as EVERY
from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

with installed_by("pip install 'transformers[torch]'"):
    from transformers import Trainer, TrainerCallback, TrainingArguments

# The Trainer always computes the norm of the gradients, which torch does not support for sparse gradients.
CAPABILITIES = EVERY - {"several-optimizers", "sparse-gradients"}


class _Evaluations(TrainerCallback):
    """Evaluates every ``job.validate_every`` batches. The Trainer's own option counts optimizer steps."""

    def __init__(self, job, trainer):
        self.job, self.trainer, self.batches = job, trainer, 0

    def on_epoch_begin(self, *args, **kwargs):
        self.batches = 0

    def on_substep_end(self, *args, **kwargs):
        if self._due():
            self.trainer.evaluate()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = self._due()

    def _due(self):
        self.batches += 1
        return self.batches % self.job.validate_every == 0


class _Reports(TrainerCallback):
    """Passes the Trainer's logs to the job."""

    def __init__(self, job):
        self.job = job

    def on_log(self, args, state, control, logs, **kwargs):
        for name, own in (("loss", "loss"), ("val_loss", "eval_loss")):
            if own in logs:
                self.job.log(name, logs[own])


class _InOrder(Trainer):
    """A Trainer that does not shuffle, for versions before 5.0, which have no option for it."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


@subject(
    name="transformers",
    backends=["none", "ddp"],
    precisions={"cuda": ["64", "32", "16", "bf16"], "cpu": ["64", "32", "bf16"]},  # float16 on a cpu is refused
    capabilities=CAPABILITIES,
    library="transformers",
)
def train(job):
    model = job.model_with_loss()
    optimizer = job.optimizer(model.parameters())
    in_order = {} if job.shuffle else {"train_sampling_strategy": "sequential"}
    has_option = in_order.keys() <= {field.name for field in fields(TrainingArguments)}
    trainer = (Trainer if has_option else _InOrder)(
        model=model,
        args=TrainingArguments(remove_unused_columns=False, **(in_order if has_option else {}), **arguments(job)),
        train_dataset=job.dataset,
        eval_dataset=job.val_dataset,
        optimizers=(optimizer, job.scheduler(optimizer)),
    )
    fit(job, trainer)


def arguments(job):
    return {
        "output_dir": job.checkpoint_dir or tempfile.gettempdir(),
        "use_cpu": job.accelerator == "cpu",
        "ddp_backend": job.comm if job.world_size > 1 else None,
        "ddp_find_unused_parameters": job.unused_parameters,
        "per_device_train_batch_size": job.batch_size,
        "per_device_eval_batch_size": job.batch_size,
        "num_train_epochs": job.epochs,
        "max_steps": job.stop_after_step or -1,
        "seed": job.seed,
        "gradient_accumulation_steps": job.accumulate,
        "max_grad_norm": job.clip_norm or 0.0,
        "lr_scheduler_type": "constant",  # if the job has no schedule
        "fp16": job.precision == "16",
        "bf16": job.precision == "bf16",
        "save_strategy": "steps" if job.stop_after_step else "no",
        "save_steps": job.stop_after_step or 1,
        "logging_strategy": "epoch",
        # These only cost time.
        "report_to": "none",
        "disable_tqdm": True,
    }


def fit(job, trainer):
    trainer.add_callback(_Reports(job))
    if job.validate_every:
        trainer.add_callback(_Evaluations(job, trainer))
    trainer.train(resume_from_checkpoint=job.resume)
