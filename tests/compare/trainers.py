"""Trainers to be measured in turns: a plain loop, the same one with much more to do, and one that raises."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from harness import subject


def _train(job, forwards=1):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, job.batch_size):
        for _ in range(forwards - 1):
            with torch.no_grad():
                model(batch)
        job.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@subject(name="plain", backends=["none"], precisions=["32"])
def plain(job):
    _train(job)


@subject(name="laborious", backends=["none"], precisions=["32"])
def laborious(job):
    _train(job, forwards=100)


@subject(name="raising", backends=["none"], precisions=["32"])
def raising(job):
    raise RuntimeError("not today")


@subject(name="elsewhere", backends=["ddp"], precisions=["32"])
def elsewhere(job):
    _train(job)
