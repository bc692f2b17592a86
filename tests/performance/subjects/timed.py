"""Trainers to time: one that keeps its own time, some that end badly, some that train wrongly."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


def at_once(number, step, begun):
    step()


def fit(job, around_step=at_once, *, shares=True, joins=True, batches=None):
    """Train ``job`` plainly; ``around_step(number, step)`` must call ``step``."""
    model = job.model()
    if job.world_size > 1 and joins:
        torch.distributed.init_process_group(job.comm)
        model = DistributedDataParallel(model)
    ranks = (job.world_size, job.rank) if shares else (1, 0)
    sampler = DistributedSampler(job.dataset, *ranks, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    for number, batch in enumerate(loader):
        if number == batches:
            return
        begun = time.monotonic()
        with job.autocast():
            loss = job.loss(model(batch), batch)

        loss.backward()
        around_step(number, optimizer.step, begun)
        optimizer.zero_grad()


@subject(name="plain", backends=["none", "ddp"], precisions=["32", "16", "bf16"])
def plain(job):
    fit(job)


@subject(name="keeps-time", backends=["none", "ddp"])
def keeps_time(job):
    """Record, by its own clock, when each forward starts, and the moments around the end of each step."""
    noted = []

    def note(number, step, begun):
        before = time.monotonic()
        step()
        noted.append((begun, before, time.monotonic()))

    fit(job, note)
    Path(os.environ["TIMED_NOTES"], f"rank-{job.rank}.json").write_text(json.dumps(noted))


def at_the_fortieth(do):
    """Return a function that acts on the last rank, in the middle of a round."""

    def train(job):
        def maybe(number, step, begun):
            if number == 40 and job.rank == job.world_size - 1:
                do()
            step()

        fit(job, maybe)

    return train


def fail():
    raise RuntimeError("the fortieth batch is broken")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    threading.Event().wait()


raises = subject(name="raises", backends=["none", "ddp"])(at_the_fortieth(fail))
dies = subject(name="dies", backends=["none", "ddp"])(at_the_fortieth(die))
hangs = subject(name="hangs", backends=["none", "ddp"])(at_the_fortieth(hang))


@subject(name="stops-early", backends=["none", "ddp"])
def stops_early(job):
    fit(job, batches=30)


@subject(name="goes-on", backends=["none", "ddp"])
def goes_on(job):
    """Step twice per batch."""
    fit(job, lambda number, step, begun: (step(), step()))


@subject(name="alone", backends=["none", "ddp"])
def alone(job):
    """Train each rank on its share, without communication."""
    fit(job, joins=False)


@subject(name="repeats", backends=["none", "ddp"])
def repeats(job):
    """Give all ranks the same samples, a rank's share of them."""
    job.dataset._count //= job.world_size
    fit(job, shares=False)


@subject(name="hoards", backends=["none"])
def hoards(job):
    """Use 96 MiB for a moment, in the middle of a round."""

    def for_a_moment(number, step, begun):
        if number == 40:
            torch.ones(96, 1 << 20, dtype=torch.uint8)
        step()

    fit(job, for_a_moment)


@subject(name="overflows", backends=["none"], precisions=["16"])
def overflows(job):
    """Scale the loss so that the first steps are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, batch_size=job.batch_size):
        with job.autocast():
            loss = job.loss(model(batch), batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
