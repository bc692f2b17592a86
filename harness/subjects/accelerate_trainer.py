"""Hugging Face Accelerate under test: a loop of one's own around ``prepare`` and ``accumulate``."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from harness.subjects.declare import subject
from harness.subjects.released import installed_by, where_there_is_cuda

with installed_by("pip install accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "validation", "checkpoint",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

PRECISIONS = {"64": "no", "32": "no", "16": "fp16", "bf16": "bf16"}


@subject(
    name="accelerate",
    backends=["none", "ddp"],
    precisions=["64", "32", "bf16", *where_there_is_cuda("16")],  # float16 on a cpu is refused
    capabilities=CAPABILITIES,
)
def train(job):
    """Train ``job`` with ``accelerate.Accelerator``, which finds the ranks by torchrun's variables."""
    accelerator = Accelerator(
        cpu=job.accelerator == "cpu",
        mixed_precision=PRECISIONS[job.precision],
        gradient_accumulation_steps=job.accumulate,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=job.comm),
            DistributedDataParallelKwargs(find_unused_parameters=job.unused_parameters),
        ],
    )
    set_seed(job.seed, device_specific=True)  # what must be equal on all ranks is accelerate's to make equal
    bare = job.model()
    optimizer = job.optimizer(bare.parameters())
    model, optimizer, loader, val_loader = accelerator.prepare(
        bare,
        optimizer,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        DataLoader(job.val_dataset, batch_size=job.batch_size),
    )
    scheduler = accelerator.prepare(job.scheduler(optimizer))
    progress = _Progress()
    accelerator.register_for_checkpointing(progress)
    if job.resume:
        accelerator.load_state(job.checkpoint_dir)
    for epoch in range(progress.epoch, job.epochs):
        rest = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
        for batch in rest:
            with accelerator.accumulate(model):
                loss = job.loss(model(batch), batch)
                accelerator.backward(loss)
                if job.clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            progress.batches += 1
            progress.steps += accelerator.sync_gradients
            if progress.steps == job.stop_after_step:
                accelerator.save_state(job.checkpoint_dir)
                return
            if job.validate_every and progress.batches % job.validate_every == 0:
                evaluate(job, model, val_loader)
        progress.epoch, progress.batches = epoch + 1, 0


class _Progress:
    """How far training is: what Accelerate's checkpoint does not hold by itself."""

    def __init__(self):
        self.epoch = self.batches = self.steps = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@torch.no_grad()
def evaluate(job, model, loader):
    """Take the loss of this rank's share of the held-out samples."""
    model.eval()
    for batch in loader:
        job.loss(model(batch), batch)
    model.train()
