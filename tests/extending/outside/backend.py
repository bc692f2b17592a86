"""A backend, and a trainer that supports it: one file, given to ``--subject``, and to pytest's ``-p``."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject
from plumbline.core.backend import BACKENDS, Backend, Dimension, devices

BACKENDS.register(Backend("gather", (Dimension("replicate", devices),), column="GATHER", opt_in=True))


@subject(name="gathers", backends=["gather"], precisions=["32"])
def train(job):
    torch.distributed.init_process_group(job.comm)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                gathered = [torch.empty_like(parameter.grad) for _ in range(job.world_size)]
                torch.distributed.all_gather(gathered, parameter.grad)
                parameter.grad.copy_(torch.stack(gathered).mean(0))
            optimizer.step()
    torch.distributed.destroy_process_group()
