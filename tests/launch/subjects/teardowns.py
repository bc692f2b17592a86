"""Right trainers that tear down in all possible ways; some hang there, waiting for something that never happens."""

from __future__ import annotations

import ctypes
import gc
import os
import signal

import torch
from right_training import fit, for_ever
from torch.distributed import destroy_process_group, init_process_group
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject


def hold_the_interpreter_lock_for_ever():
    os.write(1, b"hangs\n")
    ctypes.PyDLL(None).pause()  # PyDLL holds the GIL during calls


@subject(name="destroys", backends=["ddp"])
def destroys(job):
    model = fit(job)
    destroy_process_group()
    assert model is not None  # it outlives its process group, as in every tutorial


@subject(name="releases-first", backends=["ddp"])
def releases_first(job):
    model = fit(job)
    del model
    gc.collect()
    torch.distributed.destroy_process_group()


@subject(name="rank-0-waits", backends=["ddp"])
def rank_0_waits(job):
    fit(job)
    if job.rank == 0:
        os.write(1, b"hangs\n")
        torch.distributed.barrier()
    for_ever()


@subject(name="hangs-after-destroying", backends=["ddp"])
def hangs_after_destroying(job):
    fit(job)
    destroy_process_group()
    hold_the_interpreter_lock_for_ever()


@subject(name="dies-after-destroying", backends=["ddp"])
def dies_after_destroying(job):
    fit(job)
    destroy_process_group()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@subject(name="doubles-and-hangs", backends=["ddp"])
def doubles_and_hangs(job):
    fit(job, factor=2.0)
    for_ever()


@subject(name="hangs-in-the-middle", backends=["ddp"])
def hangs_in_the_middle(job):
    init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, job.batch_size, sampler=DistributedSampler(job.dataset, seed=job.seed)):
        optimizer.zero_grad()
        job.loss(model(batch), batch).backward()
        optimizer.step()
    destroy_process_group()
    for_ever()


@subject(name="children-wait", backends=["ddp"], launch="node")
def children_wait(job):
    start_processes(child, (job, False), job.gpus, start_method="fork")


@subject(name="children-destroy", backends=["ddp"], launch="node")
def children_destroy(job):
    start_processes(child, (job, True), job.gpus, start_method="fork")


def child(place, job, destroys):
    """Train as one rank, then destroy the group on all ranks, or hang on the first."""
    model = fit(job, rank=place)
    if destroys:
        destroy_process_group()
        assert model is not None
    elif place == 0:
        for_ever()
