"""Hugging Face Accelerate: a training loop with ``prepare`` and ``accumulate``."""

import torch
from torch.utils.data import DataLoader

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import installed_by, weighted

with installed_by("pip install accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed

PRECISIONS = {"64": "no", "32": "no", "16": "fp16", "bf16": "bf16"}


@subject(
    name="accelerate",
    backends=["none", "ddp"],
    precisions={"cuda": list(PRECISIONS), "cpu": ["64", "32", "bf16"]},  # float16 on a cpu is refused
    capabilities=CAPABILITIES,
    library="accelerate",
)
def train(job):
    accelerator = Accelerator(
        cpu=job.accelerator == "cpu",
        mixed_precision=PRECISIONS[job.precision],
        gradient_accumulation_steps=job.accumulate,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=job.comm),
            DistributedDataParallelKwargs(find_unused_parameters=job.unused_parameters),
        ],
    )
    set_seed(job.seed, device_specific=True)  # seeds differ, so that Accelerate itself must synchronise ranks
    bare = job.model()
    optimizers = job.optimizers(bare.parameters())
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    model, loader, val_loader, *stepped = accelerator.prepare(
        bare,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        DataLoader(job.val_dataset, batch_size=job.batch_size),
        *optimizers,
        *schedulers,
    )
    optimizers, schedulers = stepped[: len(optimizers)], stepped[len(optimizers) :]
    progress = _Progress()
    accelerator.register_for_checkpointing(progress)
    if job.resume:
        accelerator.load_state(job.checkpoint_dir)
    for epoch in range(progress.epoch, job.epochs):
        rest = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        for batch in rest:
            with accelerator.accumulate(model):
                loss = job.loss(model(batch), batch)
                accelerator.backward(loss)
                if job.clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
                for optimizer in optimizers:
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            sums += weighted(loss, batch)
            progress.batches += 1
            progress.steps += accelerator.sync_gradients
            if progress.steps == job.stop_after_step:
                accelerator.save_state(job.checkpoint_dir)
                return
            if job.validate_every and progress.batches % job.validate_every == 0:
                job.log("val_loss", evaluate(job, accelerator, model, val_loader))
        if sums.any():  # not if training was interrupted at the end of the epoch
            total, count = accelerator.reduce(sums, "sum")
            job.log("loss", total / count)
        progress.epoch, progress.batches = epoch + 1, 0
    accelerator.end_training()


class _Progress:
    """The progress of training, which Accelerate's checkpoints do not contain."""

    def __init__(self):
        self.epoch = self.batches = self.steps = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


@torch.no_grad()
def evaluate(job, accelerator, model, loader):
    model.eval()
    sums = 0
    for batch in loader:
        outputs, gathered = accelerator.gather_for_metrics((model(batch), batch))  # without padding of the last batch
        sums += weighted(job.loss(outputs, gathered), gathered)
    model.train()
    return sums[0] / sums[1]
