"""Trainers that say where they are, and one that waits in the middle until it is told to go on."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject


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


@subject(name="says-where-it-is", backends=["ddp"])
def says_where_it_is(job):
    said = {name: os.environ[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "RANK", "GROUP_RANK")}
    print(json.dumps({**said, "host": socket.gethostname()}), flush=True)
    fit(job)


@subject(name="waits-in-the-middle", backends=["ddp"])
def waits_in_the_middle(job):
    """Touch a file after the first step, and go on when there is another."""
    folder = Path(os.environ["PLUMBLINE_TEST_FOLDER"])

    def wait():
        (folder / f"reached-{job.rank}").touch()
        while not (folder / "go-on").exists():
            time.sleep(0.01)

    fit(job, wait)
