"""Trainers whose runs are judged again: a right one, a wrong one, one that raises, and one with a rank that dies."""

from __future__ import annotations

import os

import torch.distributed

from plumbline import subject


def fit(job, *, factor=1.0, before=lambda: None):
    torch.distributed.init_process_group(job.comm)
    model = torch.nn.parallel.DistributedDataParallel(job.model())
    sampler = torch.utils.data.DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in torch.utils.data.DataLoader(job.dataset, job.batch_size, sampler=sampler):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            (loss * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        before()


@subject(name="right", backends=["ddp"], precisions=["64", "32", "bf16"])
def right(job):
    fit(job)


@subject(name="wrong", backends=["ddp"], precisions=["64", "32", "bf16"])
def wrong(job):
    fit(job, factor=job.world_size)


@subject(name="raising", backends=["ddp"])
def raising(job):
    fit(job)
    raise RuntimeError("no more")


@subject(name="dying", backends=["ddp"])
def dying(job):
    fit(job, before=lambda: os._exit(3) if job.rank == 1 else None)
