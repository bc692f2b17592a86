"""A right trainer with a hook for faults, on which the other files here are based."""

from __future__ import annotations

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject

STEP = 2
"""The number of optimizer steps before the fault."""


def fit(job, fault, everywhere=False):
    """Train correctly; after ``STEP`` steps, call ``fault(job)`` on the last rank or on every rank."""
    model = job.model()
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = DistributedDataParallel(model)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    done = 0
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            if done == STEP and (everywhere or job.rank == job.world_size - 1):
                fault(job)
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
            done += 1
    return model


def nothing(job):
    """Do nothing."""


def declare(name, fault=nothing, everywhere=False, module=None):
    """Return a subject, in the module of ``fault``, that trains correctly until ``fault(job)``."""

    @subject(name=name, backends=["none", "ddp"])
    def train(job):
        fit(job, fault, everywhere)

    # A file's subjects are those that its own functions declare.
    train.__module__ = module or fault.__module__
    return train


trains = declare("trains")
