"""Adapters around one right loop: each is wrong in its own way, except for two right ones."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


def fit(job, model, optimizer, forward=lambda model, batch: model(batch)):
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            job.loss(forward(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


class Idle:
    def step(self):
        pass

    zero_grad = step


def parallel(job):
    torch.distributed.init_process_group(job.comm)
    return DistributedDataParallel(job.model())


@subject(name="adapted", backends=["none", "ddp"], precisions=["32", "64"])
def right(job):
    model = parallel(job) if job.world_size > 1 else job.model()
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="unsynchronised", backends=["ddp"])
def unsynchronised(job):
    model = parallel(job)
    fit(job, model, job.optimizer(model.parameters()), lambda model, batch: model.module(batch))


@subject(name="alone", backends=["ddp"])
def alone(job):
    model = job.model()
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="returning", backends=["ddp"])
def returning(job):
    parallel(job)


@subject(name="not-stepping", backends=["ddp"])
def not_stepping(job):
    model = parallel(job)
    fit(job, model, Idle())


@subject(name="raising-early", backends=["ddp"])
def raising(job):
    parallel(job).no_such_thing()


@subject(name="promising", backends=["ddp"], precisions=["32", "16"])
def promising(job):
    if job.precision == "16":
        raise ValueError("not in 16 bits")
    right(job)


def wait_long():
    time.sleep(1000)


@subject(name="hanging", backends=["ddp"])
def hanging(job):
    wait_long()
