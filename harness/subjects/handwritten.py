"""Training by hand with torch's own DistributedDataParallel, as its tutorial does: the yardstick, and an example."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness.subjects.declare import subject

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "several-optimizers", "validation", "checkpoint",
    "metrics",
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
    optimizers = job.optimizers(model.parameters())  # mostly it is one
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    scaler = job.grad_scaler()
    parts = {"model": bare, "scaler": scaler}
    for name, several in {"optimizer": optimizers, "scheduler": schedulers}.items():
        parts |= {f"{name} {number}": part for number, part in enumerate(several)}
    begun = load(job, parts) if job.resume else {"epoch": 0, "samples": 0, "steps": 0}
    steps = begun["steps"]
    for epoch in range(begun["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for number, batch in enumerate(loader):
            if epoch == begun["epoch"] and number * job.global_batch_size < begun["samples"]:
                continue  # trained on before the interruption
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            last = place == window - 1
            batch = {name: column.to(job.device) for name, column in batch.items()}
            # Gradients are averaged over ranks once, with the window's last backward.
            with nullcontext() if last or job.world_size == 1 else model.no_sync():
                with job.autocast():
                    loss = job.loss(model(batch), batch)
                scaler.scale(loss / window).backward()
            total, count = total + float(loss) * len(batch["index"]), count + len(batch["index"])
            if last:
                if job.clip_norm is not None:
                    for optimizer in optimizers:
                        scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                skipped = scaler.get_scale() < scale
                for scheduler in () if skipped else schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                steps += 1
                if steps == job.stop_after_step:
                    save(job, parts, epoch=epoch, samples=(number + 1) * job.global_batch_size, steps=steps)
                    return
            if job.validate_every and (number + 1) % job.validate_every == 0:
                job.log("val_loss", evaluate(job, bare, val_loader))
        if count:  # nothing is left of an epoch at whose end training was interrupted
            job.log("loss", mean_over_ranks(job, total, count))


def mean_over_ranks(job, total, count):
    """Return the mean over the samples of all ranks; this one has ``count`` of them, which sum up to ``total``."""
    sums = torch.tensor([total, count], dtype=torch.float64, device=job.device)
    if job.world_size > 1:
        torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(job, parts, **progress):
    """Write what training changes, once for all ranks, which hold the same.

    The place in the epoch is counted in samples over all ranks: whoever goes on may have another number of them.
    """
    if job.rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "progress": progress}, f"{job.checkpoint_dir}/checkpoint.pt")


def load(job, parts):
    """Put the parts, on every rank, where they were saved; return the progress until then."""
    saved = torch.load(f"{job.checkpoint_dir}/checkpoint.pt", map_location=job.device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["progress"]


@torch.no_grad()
def evaluate(job, model, loader):
    """Return the mean loss of the held-out samples, a share a rank; not through DDP, as shares are unequal."""
    model.eval()
    total = 0.0
    for batch in loader:
        batch = {name: column.to(job.device) for name, column in batch.items()}
        with job.autocast():
            total += float(job.loss(model(batch), batch)) * len(batch["index"])
    model.train()
    return mean_over_ranks(job, total, len(loader.sampler))
