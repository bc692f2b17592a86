"""The Hugging Face Trainer under test, with its own sampling, accumulation, clipping, precision and checkpoints."""

from __future__ import annotations

import tempfile
from dataclasses import fields

from torch.utils.data import SequentialSampler

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

with installed_by("pip install 'transformers[torch]'"):
    from transformers import Trainer, TrainerCallback, TrainingArguments

# Not sparse gradients, of which it always takes the norm.
CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "validation", "checkpoint", "metrics",
    "unused-parameters", "frozen-parameters", "nested-outputs",
]  # fmt: skip


class _Evaluations(TrainerCallback):
    """Evaluates after so many batches, as the job asks; by itself the Trainer counts steps."""

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
    """Hands on what the Trainer logs."""

    def __init__(self, job):
        self.job = job

    def on_log(self, args, state, control, logs, **kwargs):
        for name, own in (("loss", "loss"), ("val_loss", "eval_loss")):
            if own in logs:
                self.job.log(name, logs[own])


class _InOrder(Trainer):
    """The Trainer where it cannot be told not to shuffle: before 5.0."""

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
    told = in_order.keys() <= {field.name for field in fields(TrainingArguments)}
    trainer = (Trainer if told else _InOrder)(
        model=model,
        args=TrainingArguments(remove_unused_columns=False, **(in_order if told else {}), **arguments(job)),
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
        "lr_scheduler_type": "constant",  # where the job has no schedule of its own
        "fp16": job.precision == "16",
        "bf16": job.precision == "bf16",
        "save_strategy": "steps" if job.stop_after_step else "no",
        "save_steps": job.stop_after_step or 1,
        "logging_strategy": "epoch",
        # What costs seconds and computes nothing.
        "report_to": "none",
        "disable_tqdm": True,
    }


def fit(job, trainer):
    trainer.add_callback(_Reports(job))
    if job.validate_every:
        trainer.add_callback(_Evaluations(job, trainer))
    trainer.train(resume_from_checkpoint=job.resume)
