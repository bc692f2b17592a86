"""Lightning Fabric under test: a loop of one's own around its strategies, samplers, precision and clipping."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from harness.subjects.declare import subject
from harness.subjects.released import installed_by

with installed_by("pip install lightning"):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.strategies import DDPStrategy

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "validation",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@subject(name="fabric", backends=["none", "ddp"], precisions=list(PRECISIONS), capabilities=CAPABILITIES)
def train(job):
    """Train ``job`` with ``lightning.fabric.Fabric``, which finds the ranks by torchrun's variables."""
    fabric = Fabric(
        accelerator="gpu" if job.accelerator == "cuda" else "cpu",
        devices=job.gpus,
        num_nodes=job.num_nodes,
        strategy=_strategy(job),
        **_precision(job),
    )
    fabric.launch()
    fabric.seed_everything(job.seed, workers=True, verbose=False)
    bare = job.model()
    model, optimizer = fabric.setup(bare, job.optimizer(bare.parameters()))
    scheduler = job.scheduler(optimizer)
    loader, val_loader = fabric.setup_dataloaders(
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        DataLoader(job.val_dataset, batch_size=job.batch_size),
    )
    for _ in range(job.epochs):
        for number, batch in enumerate(loader):
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            last = place == window - 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = job.loss(model(batch), batch)
                fabric.backward(loss / window)
            if last:
                if job.clip_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()  # Fabric does not tell whether its scaler skipped the step
                optimizer.zero_grad()
            if job.validate_every and (number + 1) % job.validate_every == 0:
                evaluate(job, model, val_loader)


@torch.no_grad()
def evaluate(job, model, loader):
    """Take the loss of this rank's share of the held-out samples."""
    model.eval()
    for batch in loader:
        job.loss(model(batch), batch)
    model.train()


def _strategy(job):
    if job.backend == "none":
        return "auto"
    return DDPStrategy(process_group_backend=job.comm, find_unused_parameters=job.unused_parameters)


def _precision(job):
    """Return the flag; for float16 on a cpu its plugin, as the flag would be taken for bfloat16 there."""
    if job.precision == "16" and job.accelerator == "cpu":
        return {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    return {"precision": PRECISIONS[job.precision]}
