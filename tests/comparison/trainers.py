"""Trainers to measure in turns: a plain loop, the same with more memory, and one that raises."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from plumbline import subject


def _train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, job.batch_size):
        job.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@subject(name="plain", backends=["none"], precisions=["32"])
def plain(job):
    _train(job)


@subject(name="burdened", backends=["none"], precisions=["32"])
def burdened(job):
    burden = torch.ones(128, 1024, 1024)  # 512 MiB, which does not depend on the machine's speed
    _train(job)
    del burden


@subject(name="raising", backends=["none"], precisions=["32"])
def raising(job):
    raise RuntimeError("not today")


@subject(name="elsewhere", backends=["ddp"], precisions=["32"])
def elsewhere(job):
    _train(job)
