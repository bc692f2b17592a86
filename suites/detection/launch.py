"""Ranks that misread what their launcher told them, join the wrong group, or do not train."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def fit(job, model, sampler):
    """Train correctly on the samples that ``sampler`` draws."""
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "launch",
    causes=["local-rank-for-rank"],
    on={**any_check("mlp/ddp/2x2/32", "mlp/ddp/2x1/64"), **failing("samples", "mlp/ddp/2x2")},
)
def local_rank_used_as_rank(job):
    """Passes LOCAL_RANK to the sampler as the rank, so all nodes train on the same samples."""
    model = ddp(job)
    fit(job, model, DistributedSampler(job.dataset, job.world_size, int(os.environ["LOCAL_RANK"]), seed=job.seed))


@known_bad("launch", causes=["local-rank-for-rank"], on=["mlp/ddp/2x2/32", "mlp/ddp/2x2/64"])
def node_taken_for_the_world(job):
    """Passes LOCAL_RANK and the GPUs per node to the sampler, so each node goes through the whole dataset."""
    model = ddp(job)
    fit(job, model, DistributedSampler(job.dataset, job.gpus, job.local_rank, seed=job.seed))


@known_bad("launch", causes=["node-rank-for-rank"], on=["mlp/ddp/2x2/32", "mlp/ddp/2x2/64"])
def node_rank_used_as_rank(job):
    """Passes the node rank to the sampler as the rank, so the GPUs of a node train on the same samples."""
    model = ddp(job)
    fit(job, model, DistributedSampler(job.dataset, job.world_size, job.node_rank, seed=job.seed))


@known_bad(
    "launch",
    causes=["trained-alone"],
    on={**any_check("mlp/ddp/1x2/32", "mlp/ddp/2x2/64"), **failing("launch", "mlp/ddp/1x2")},
)
def every_process_alone(job):
    """Never joins a process group, so each process trains alone."""
    model = job.model()
    fit(job, model, DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed))


@known_bad("launch", causes=["trained-alone"], on=["mlp/ddp/1x2/32", "mlp/ddp/2x2/64"])
def master_address_ignored(job):
    """Each process creates a world of its own, with one rank."""
    dist.init_process_group(job.comm, store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(job.model())
    fit(job, model, DistributedSampler(job.dataset, seed=job.seed))


@known_bad("launch", causes=["another-world"], on=["mlp/ddp/2x2/32", "cnn-batchnorm/ddp/2x2/64"])
def a_world_for_each_node(job):
    """Each node creates a process group of its own."""
    store = dist.PrefixStore(
        f"node {job.node_rank}", dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    )
    dist.init_process_group(job.comm, store=store, rank=job.local_rank, world_size=job.gpus)
    model = DistributedDataParallel(job.model())
    fit(job, model, DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed))


@known_bad("launch", causes=["some-ranks-never-stepped"], on=["mlp/ddp/1x2/32", "mlp/ddp/2x2/64"])
def only_rank_zero_trains(job):
    """Ranks other than 0 join the group, but never train."""
    model = alone(job)
    if job.rank == 0:
        fit(job, model, DistributedSampler(job.dataset, job.world_size, job.rank, seed=job.seed))


@known_bad("launch", causes=["some-ranks-never-stepped"], on=["mlp/ddp/2x2/32", "mlp/ddp/2x2/64"])
def only_the_first_gpu_of_a_node_trains(job):
    """Ranks whose LOCAL_RANK is not 0 never train."""
    model = alone(job)
    group = dist.new_group(range(0, job.world_size, job.gpus))
    dist.barrier()
    optimizer = job.optimizer(model.parameters())
    if job.local_rank == 0:
        for epoch in range(job.epochs):
            for batch in loader(job, epoch):
                job.loss(model(batch), batch).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= job.num_nodes
                optimizer.step()
                optimizer.zero_grad()


@known_bad("launch", causes=["raised"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/32"])
def world_size_read_as_a_word(job):
    """Uses WORLD_SIZE as a string, which raises at once."""
    model = alone(job)
    share = len(job.dataset) // os.environ["WORLD_SIZE"]
    average(job, model)
    torch.randperm(share)
