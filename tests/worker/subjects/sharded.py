"""Right trainers that share weights out in several ways, and one that loses its way."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject

PRECISIONS = ["64", "32"]


def batches(job):
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        yield from DataLoader(job.dataset, job.batch_size, sampler=sampler)


def fit(job, model, optimizer):
    for batch in batches(job):
        job.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@subject(name="copies", backends=["ddp"], precisions=PRECISIONS)
def copies(job):
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="shards", backends=["fsdp"], precisions=PRECISIONS)
def shards(job):
    dist.init_process_group(job.comm)
    model = job.model()
    for layer in getattr(model, "layers", ()):
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="hybrid", backends=["fsdp"], precisions=PRECISIONS)
def hybrid(job):
    dist.init_process_group(job.comm)
    mesh = init_device_mesh("cpu", (job.num_nodes, job.gpus), mesh_dim_names=("node", "gpu"))
    model = fully_shard(job.model(), mesh=mesh)
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="zero", backends=["zero"], precisions=PRECISIONS)
def zero(job):
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    plain = job.optimizer(model.parameters())
    fit(job, model, ZeroRedundancyOptimizer(model.parameters(), type(plain), lr=plain.defaults["lr"]))


@subject(name="astray", backends=["fsdp"], precisions=PRECISIONS)
def astray(job):
    """Only rank 0 steps: whoever waited for another rank in its step would wait for ever."""
    dist.init_process_group(job.comm)
    model = fully_shard(job.model())
    optimizer = job.optimizer(model.parameters())
    batch = next(iter(batches(job)))
    job.loss(model(batch), batch).backward()
    if job.rank == 0:
        optimizer.step()


@subject(name="flat", backends=["fsdp"], precisions=PRECISIONS)
def flat(job):
    """FSDP1, whose parameters are pieces of long vectors."""
    dist.init_process_group(job.comm)
    model = FullyShardedDataParallel(job.model(), device_id=torch.device("cpu"), use_orig_params=job.precision == "64")
    fit(job, model, job.optimizer(model.parameters()))
