"""Trainers that say what they have been told by torchrun, and one that ends its node's server once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "PLUMBLINE_TOKEN"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def fit(job, after_a_step=lambda: None):
    model = job.model()
    torch.distributed.init_process_group(job.comm)
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
            after_a_step()


@subject(name="says-what-it-was-told", backends=["ddp"])
def says_what_it_was_told(job):
    print(json.dumps({name: os.environ.get(name) for name in NAMES}), flush=True)
    fit(job)


@subject(name="dies-on-the-second-node", backends=["ddp"])
def dies_on_the_second_node(job):
    fit(job, lambda: os.kill(os.getpid(), signal.SIGKILL) if job.rank == 2 else None)


@subject(name="takes-its-node-along-once", backends=["ddp"])
def takes_its_node_along_once(job):
    once = Path(os.environ["PLUMBLINE_TEST_FOLDER"]) / "once"

    def take_along():
        if job.rank == 2 and not once.exists():
            once.touch()
            os.kill(os.getppid(), signal.SIGKILL)

    fit(job, take_along)
