"""Minimal hand-written loops, one per strategy: the baseline of the overhead.

They are ordinary subjects, so the conformance suite can check that they compute the right thing.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject
from plumbline.devices.calls import set_current


@subject(name="yardstick", backends=["none", "dp", "ddp", "ddp2"], precisions=["64", "32", "16", "bf16"])
def train(job):
    """Train ``job`` on one device or more."""
    set_current(job.device)
    model = job.model().to(job.device)
    forward, replicas = model, None
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
    if job.backend == "ddp":
        forward = DistributedDataParallel(model, device_ids=job.device_ids)
    elif job.backend in ("dp", "ddp2") and job.accelerator != "cpu":
        forward = DataParallel(Autocast(model, job), job.devices)
    elif job.backend in ("dp", "ddp2"):
        forward = replicas = Replicas(model, len(job.devices))
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, job.batch_size, sampler=sampler)
    optimizer = job.optimizer(model.parameters())
    scaler = job.grad_scaler()
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            if job.accelerator != "cpu":
                batch = {name: column.to(job.device, non_blocking=True) for name, column in batch.items()}
            if job.backend == "ddp2":
                share(model)
            with job.autocast():
                loss = job.loss(forward(batch), batch)
            scaler.scale(loss).backward()
            if replicas is not None:
                replicas.collect()
            if job.backend == "ddp2":
                average(model, job.num_nodes)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def share(model):
    """Broadcast the first node's buffers to all nodes."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, src=0)


def average(model, nodes):
    """Average the gradients over nodes, in one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= nodes
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(own) for part, own in zip(parts, gradients, strict=True)])


class Autocast(nn.Module):
    """Enters the job's precision inside the forward, because DataParallel's threads do not inherit it."""

    def __init__(self, model, job):
        super().__init__()
        self.model, self.job = model, job

    def forward(self, batch):
        with self.job.autocast():
            return self.model(batch)


class Replicas:
    """DataParallel on simulated devices: each has a replica of the model, and they compute one after the other."""

    def __init__(self, model, count):
        self.models = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
        self.weights = [list(replica.parameters()) for replica in self.models]
        self.tensors = [[*replica.parameters(), *replica.buffers()] for replica in self.models]

    def __call__(self, batch):
        """Copy the model to the other replicas, and return all outputs; each replica computes a chunk of the batch."""
        with torch.no_grad():
            for tensors in self.tensors[1:]:
                torch._foreach_copy_(tensors, self.tensors[0])
        shares = zip(*(column.chunk(len(self.models)) for column in batch.values()), strict=True)
        return torch.cat(
            [model(dict(zip(batch, share, strict=True))) for model, share in zip(self.models, shares, strict=True)]
        )

    def collect(self):
        """Add the other replicas' gradients to the model's."""
        for weights in self.weights[1:]:
            torch._foreach_add_([own.grad for own in self.weights[0]], [weight.grad for weight in weights])
            for weight in weights:
                weight.grad = None
