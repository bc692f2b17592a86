"""The Hugging Face Trainer under test, with its own sampling, accumulation, clipping, precision and checkpoints."""

from __future__ import annotations

import tempfile
from dataclasses import fields

from torch import nn
from torch.utils.data import SequentialSampler

from harness.subjects.declare import subject
from harness.subjects.released import installed_by, where_there_is_cuda

with installed_by("pip install 'transformers[torch]'"):
    from transformers import Trainer, TrainingArguments

# Not validation, which it counts in steps, nor sparse gradients, of which it always takes the norm.
CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "checkpoint",
    "unused-parameters", "frozen-parameters", "nested-outputs",
]  # fmt: skip


class _WithLoss(nn.Module):
    """The job's model as the Trainer wants a model: it takes the columns by name and returns its own loss."""

    def __init__(self, job):
        super().__init__()
        self.job, self.model = job, job.model()

    def forward(self, **batch):
        return {"loss": self.job.loss(self.model(batch), batch)}


class _InOrder(Trainer):
    """The Trainer where it cannot be told not to shuffle: before 5.0."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


@subject(
    name="transformers",
    backends=["none", "ddp"],
    precisions=["64", "32", "bf16", *where_there_is_cuda("16")],  # float16 on a cpu is refused
    capabilities=CAPABILITIES,
)
def train(job):
    """Train ``job`` with ``transformers.Trainer``, which finds the ranks by torchrun's variables."""
    model = _WithLoss(job)
    optimizer = job.optimizer(model.parameters())
    in_order = {} if job.shuffle else {"train_sampling_strategy": "sequential"}
    told = in_order.keys() <= {field.name for field in fields(TrainingArguments)}
    trainer = (Trainer if told else _InOrder)(
        model=model,
        args=TrainingArguments(
            output_dir=job.checkpoint_dir or tempfile.gettempdir(),
            use_cpu=job.accelerator == "cpu",
            ddp_backend=job.comm if job.world_size > 1 else None,
            ddp_find_unused_parameters=job.unused_parameters,
            per_device_train_batch_size=job.batch_size,
            remove_unused_columns=False,
            **(in_order if told else {}),
            num_train_epochs=job.epochs,
            max_steps=job.stop_after_step or -1,
            seed=job.seed,
            gradient_accumulation_steps=job.accumulate,
            max_grad_norm=job.clip_norm or 0.0,
            lr_scheduler_type="constant",  # where the job has no schedule of its own
            fp16=job.precision == "16",
            bf16=job.precision == "bf16",
            save_strategy="steps" if job.stop_after_step else "no",
            save_steps=job.stop_after_step or 1,
            # What costs seconds and computes nothing.
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=job.dataset,
        optimizers=(optimizer, job.scheduler(optimizer)),
    )
    trainer.train(resume_from_checkpoint=job.resume)
