"""The training loop shared by the other subjects in this folder: right by default."""

from __future__ import annotations

import os
import threading

from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def for_ever():
    """Report in the log, and hang."""
    os.write(1, b"hangs\n")
    threading.Event().wait()


def fit(job, *, in_the_middle=lambda: None, after_a_step=lambda: None, model=None, rank=None, factor=1.0, workers=0):
    """Train as ``rank``, by default the job's; return the model.

    ``after_a_step`` is called on each rank after each step, ``in_the_middle`` on the last rank only. The loss is
    multiplied by ``factor``.
    """
    rank = job.rank if rank is None else rank
    model = job.model() if model is None else model
    if job.world_size > 1:
        init_process_group(job.comm, rank=rank, world_size=job.world_size)
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(job.dataset, job.world_size, rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler, num_workers=workers)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            (factor * job.loss(model(batch), batch)).backward()
            optimizer.step()
            after_a_step()
            if rank == job.world_size - 1:
                in_the_middle()
    return model
