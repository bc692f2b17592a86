"""Correct building blocks that the trainers of this suite share."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def ddp(job, **options):
    """Join the process group and return the job's model under DistributedDataParallel."""
    torch.distributed.init_process_group(job.comm)
    return DistributedDataParallel(job.model(), **options)


def wrapped(job):
    """Return the job's model, under DDP if there is more than one rank."""
    return ddp(job) if job.world_size > 1 else job.model()


def alone(job):
    """Join the process group and return the job's model without DDP: the caller averages gradients."""
    torch.distributed.init_process_group(job.comm)
    return job.model()


def mesh_of(job):
    """Join the process group and return a mesh of all ranks: node by GPU, or flat on a single node."""
    torch.distributed.init_process_group(job.comm)
    if job.num_nodes == 1:
        return init_device_mesh("cpu", (job.world_size,))
    return init_device_mesh("cpu", (job.num_nodes, job.gpus), mesh_dim_names=("node", "gpu"))


def sharded(job, **options):
    """Join the process group and return the job's model under fully_shard, as one unit."""
    return fully_shard(job.model(), mesh=mesh_of(job), **options)


def zero(job, model, kind=ZeroRedundancyOptimizer, **options):
    """Return the job's plain SGD with its work sharded over the ranks."""
    plain = job.optimizer(model.parameters())
    return kind(model.parameters(), type(plain), lr=plain.defaults["lr"], **options)


def loader(job, epoch):
    """Return this rank's batches of an epoch."""
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    sampler.set_epoch(epoch)
    return DataLoader(job.dataset, job.batch_size, sampler=sampler)


def average(job, model):
    """Average the gradients over the ranks."""
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= job.world_size


def train(job, model, optimizer=None, *, after_backward=lambda job, model: None):
    """Step once for each batch of all epochs, by default with the job's optimizer."""
    optimizer = job.optimizer(model.parameters()) if optimizer is None else optimizer
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            after_backward(job, model)
            optimizer.step()
            optimizer.zero_grad()


def train_scaled(job, model, optimizer, scaler, *, after_backward=lambda: None, after_update=lambda: None):
    """Step once for each batch of all epochs, in autocast and with a loss scale."""
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            after_backward()
            scaler.step(optimizer)
            scaler.update()
            after_update()
            optimizer.zero_grad()


def own_scaler(job, *, first=2.0**16, factor=0.5, skip=None):
    """Train with a hand-written loss scaler that multiplies its scale by ``factor`` after a skipped step.

    ``skip(model, optimizer, scale)`` runs at a skipped step; by default, it reports the step with ``job.skipped``.
    """
    model = wrapped(job)
    optimizer, scale = job.optimizer(model.parameters()), first
    skip = skip or (lambda model, optimizer, scale: job.skipped(optimizer, scale))
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            (loss * scale).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                for gradient in gradients:
                    gradient /= scale
                optimizer.step()
            else:
                skip(model, optimizer, scale)
                scale *= factor
            optimizer.zero_grad()


def windows(job, epoch):
    """Return an epoch's batches by accumulation window; the last window may be shorter."""
    batches = list(loader(job, epoch))
    return [batches[first : first + job.accumulate] for first in range(0, len(batches), job.accumulate)]


def replicas(job, model, batch):
    """Return each device's outputs and part of the batch, as a dp or ddp2 process computes them.

    Only the first device updates the model's buffers: the others get copies, which are discarded.
    """
    chunks = zip(*(column.chunk(len(job.devices)) for column in batch.values()), strict=True)
    parts = [dict(zip(batch, columns, strict=True)) for columns in chunks]
    copies = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in parts[1:]]
    first = model(parts[0])
    return [
        first,
        *(functional_call(model, copy, (part,)) for copy, part in zip(copies, parts[1:], strict=True)),
    ], parts
