"""Trainers that say what SLURM and torchrun have told them, and one that dies."""

from __future__ import annotations

import json
import os
import signal

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject

NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODELIST"),
    *("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "PLUMBLINE_TOKEN", "FROM_THE_USER"),
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


@subject(name="takes-its-node-along", backends=["ddp"])
def takes_its_node_along(job):
    fit(job, lambda: os.kill(os.getppid(), signal.SIGKILL) if job.rank == 2 else None)
