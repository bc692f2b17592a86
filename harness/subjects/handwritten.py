"""Training by hand with torch's own DistributedDataParallel, as its tutorial does: the yardstick, and an example."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness.subjects.declare import subject

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "validation",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip


@subject(name="torch", backends=["none", "ddp"], precisions=["64", "32", "16", "bf16"], capabilities=CAPABILITIES)
def train(job):
    """Train ``job`` with a loop that one can read from top to bottom."""
    model = bare = job.model().to(job.device)
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        device_ids = [job.device] if job.device.type == "cuda" else None
        model = DistributedDataParallel(bare, device_ids=device_ids, find_unused_parameters=job.unused_parameters)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    val_share = range(job.rank, len(job.val_dataset), job.world_size)
    val_loader = DataLoader(job.val_dataset, batch_size=job.batch_size, sampler=val_share)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    scaler = job.grad_scaler()
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            last = place == window - 1
            batch = {name: column.to(job.device) for name, column in batch.items()}
            # Gradients are averaged over ranks once, with the window's last backward.
            with nullcontext() if last or job.world_size == 1 else model.no_sync():
                with job.autocast():
                    loss = job.loss(model(batch), batch) / window
                scaler.scale(loss).backward()
            if last:
                if job.clip_norm is not None:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                skipped = scaler.get_scale() < scale
                if scheduler is not None and not skipped:
                    scheduler.step()
                optimizer.zero_grad()
            if job.validate_every and (number + 1) % job.validate_every == 0:
                evaluate(job, bare, val_loader)


@torch.no_grad()
def evaluate(job, model, loader):
    """Return the mean loss of this rank's share of the held-out samples; not through DDP, as shares are unequal."""
    model.eval()
    total = 0.0
    for batch in loader:
        batch = {name: column.to(job.device) for name, column in batch.items()}
        with job.autocast():
            total += float(job.loss(model(batch), batch)) * len(batch["index"])
    model.train()
    return total / len(loader.sampler)
