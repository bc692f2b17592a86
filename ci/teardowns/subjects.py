"""Trainers whose last line destroys the process group while the model that uses it is still alive."""

from __future__ import annotations

import os

import torch

from plumbline import subject
from plumbline.subjects import accelerate_trainer, ignite_trainer, lightning_trainer, skeleton


@subject(name="plain-ddp", backends=["ddp"])
def plain_ddp(job):
    """Train like the file that ``plumbline new-subject`` writes; the last line is README's."""
    skeleton.train(job)


@subject(name="accelerate", backends=["ddp"], library="accelerate")
def accelerate(job):
    """Train with Accelerate, whose ``end_training()`` destroys the group."""
    accelerate_trainer.train(job)


@subject(name="lightning", backends=["ddp"], library="lightning")
def lightning(job):
    """Train with a Lightning Trainer, then destroy the group."""
    module = lightning_trainer.Adapter(job)
    lightning_trainer.fit(job, module)
    torch.distributed.destroy_process_group()
    assert module is not None  # keeps the DistributedDataParallel object alive


@subject(name="ignite", backends=["ddp"], library="pytorch-ignite")
def ignite(job):
    """Train with Ignite, whose ``idist.Parallel`` destroys the group."""
    ignite_trainer.train(job)


@subject(name="children", backends=["ddp"], launch="node")
def children(job):
    """Start the ranks by a fork, like ``torch.multiprocessing``; each destroys its group."""
    torch.multiprocessing.start_processes(_child, (job,), job.gpus, start_method="fork")


def _child(place, job):
    os.environ.update(RANK=str(place), LOCAL_RANK=str(place), WORLD_SIZE=str(job.gpus))
    skeleton.train(job)
