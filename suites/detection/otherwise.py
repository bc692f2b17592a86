"""Less common training loops: by iterations, with a fixed choice of shuffling, or with buffers per rank."""

from __future__ import annotations

import torch
from loop import ddp, loader, wrapped
from torch.utils.data import DataLoader, DistributedSampler


def seeded(job):
    """Return a generator with a seed of this rank's own."""
    return torch.Generator().manual_seed(job.seed + job.rank)


def drawn(job, generator):
    """Return a batch of samples drawn with replacement."""
    return job.dataset.batch(torch.randint(len(job.dataset), (job.batch_size,), generator=generator).tolist())


def by_iterations(job, draw=None, divisor=None, steps=None, accumulate=None):
    """Train for ``steps`` steps of ``accumulate`` batches from ``draw``; average gradients at each step's last batch.

    The defaults are correct.
    """
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    accumulate = accumulate or job.accumulate
    generator = seeded(job)
    draw = draw or (lambda: drawn(job, generator))
    for _ in range(steps or job.steps):
        for micro in range(accumulate):
            batch = draw()
            model.require_backward_grad_sync = micro == accumulate - 1
            with job.autocast():
                loss = job.loss(model(batch), batch) / (divisor or accumulate)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def in_epochs(job, shuffle, epoch_of=lambda epoch: epoch):
    """Train with a DistributedSampler that has the given ``shuffle`` and is set to ``epoch_of(epoch)``."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=shuffle, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch_of(epoch))
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def with_own_buffers(job, between=lambda model, step: None, model=None):
    """Train ``model``, by default under DDP without broadcast buffers; call ``between`` after each step."""
    model = model or ddp(job, broadcast_buffers=False)
    optimizer = job.optimizer(model.parameters())
    step = 0
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            between(model, step)


def floating(model):
    """Return the running statistics."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
