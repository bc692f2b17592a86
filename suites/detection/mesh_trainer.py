"""A right trainer on a mesh of ranks, and the collectives through which gradients flow.

A subclass says what each rank holds. One method for each part of a step: a mistake overrides the part it is in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler


class MeshTrainer(BaseTrainer):
    """Ranks that hold all of the model; gradients are averaged by hand over those with samples of their own."""

    def wrap(self, model):
        job = self.job
        dist.init_process_group(job.comm)
        self.mesh = init_device_mesh("cpu", tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
        torch.manual_seed(self.random_seed())
        self.divide(model)
        return model

    def group(self, name):
        """Return the ranks along a dimension of the mesh; None where it has no such dimension."""
        return self.mesh.get_group(name) if name in self.job.mesh else None

    def random_seed(self):
        """Return the seed of what layers draw: one for each share of the samples."""
        return self.job.seed + self.job.data_rank

    def divide(self, model):
        """Leave of the model what this rank holds: all of it."""

    def data_share(self):
        """Return which share of the samples is this rank's, and how many shares there are."""
        return self.job.data_rank, self.job.data_ranks

    def make_loader(self):
        job, (share, shares) = self.job, self.data_share()
        sampler = DistributedSampler(job.dataset, shares, share, shuffle=job.shuffle, seed=job.seed)
        return DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)

    def forward(self, batch):
        self.share_buffers()
        return self.compute(batch)

    def share_buffers(self):
        """Give all ranks the buffers of the first."""
        for buffer in self.model.buffers() if self.job.data_ranks > 1 else ():
            dist.broadcast(buffer, 0)

    def compute(self, batch):
        return self.wrapped(batch)

    def gradients(self):
        """Return this rank's part of each gradient, by the parameter's name."""
        named = self.model.named_parameters()
        return {name: local(parameter.grad) for name, parameter in named if parameter.grad is not None}

    def synchronize(self):
        if (group := self.group("replicate")) is not None:
            for gradient in self.gradients().values():
                dist.all_reduce(gradient, group=group)
                gradient /= group.size()

    def squared_norm(self):
        """Return the squared norm of the gradient of the whole model."""
        return sum(gradient.double().square().sum() for gradient in self.gradients().values())

    def clip(self):
        norm = float(self.squared_norm()) ** 0.5
        for gradient in self.gradients().values():
            gradient *= min(1.0, self.job.clip_norm / (norm + 1e-6))


def local(tensor):
    """Return this rank's part of a tensor: all of one that is not divided."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def summed(x, group):
    """Return the sum over a group's ranks; gloo adds no 16-bit numbers, so they are added as float32."""
    total = x.detach().to(torch.float32 if x.element_size() < 4 else x.dtype, copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def part(x, dim, group):
    """Return this rank's part of ``x`` along a dimension, as ``torch.chunk`` divides it; it may be empty."""
    size = -(-x.shape[dim] // group.size())
    begin = min(group.rank() * size, x.shape[dim])
    return x.narrow(dim, begin, min(size, x.shape[dim] - begin))


def joined(x, dim, group, size):
    """Return all ranks' parts of something whose length along a dimension is ``size``; parts may be unequal."""
    shape = [*x.shape]
    shape[dim] = size
    whole = x.new_zeros(shape)
    part(whole, dim, group).copy_(x.detach())
    return summed(whole, group)


class Copied(torch.autograd.Function):
    """What all ranks have enters a divided layer: its gradient is the sum of what the ranks' parts make of it."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, context.group), None


class Reduced(torch.autograd.Function):
    """The sum of what the ranks' parts make; all ranks use it alike, so its gradient is that of each part."""

    @staticmethod
    def forward(context, x, group):
        return summed(x, group)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Parted(torch.autograd.Function):
    """What all ranks have becomes this rank's part of it."""

    @staticmethod
    def forward(context, x, dim, group):
        context.dim, context.group, context.size = dim, group, x.shape[dim]
        return part(x, dim, group).clone()

    @staticmethod
    def backward(context, gradient):
        return joined(gradient, context.dim, context.group, context.size), None, None


class Gathered(torch.autograd.Function):
    """All ranks' parts; all ranks use them alike, so this rank's part has its part of the gradient."""

    @staticmethod
    def forward(context, x, dim, group, size):
        context.dim, context.group = dim, group
        return joined(x, dim, group, size)

    @staticmethod
    def backward(context, gradient):
        return part(gradient, context.dim, context.group), None, None, None


class GatheredForOwnUse(torch.autograd.Function):
    """All ranks' parts, which each rank uses otherwise: this rank's part has the sum of all ranks' gradients."""

    @staticmethod
    def forward(context, x, dim, group, size):
        context.dim, context.group = dim, group
        return joined(x, dim, group, size)

    @staticmethod
    def backward(context, gradient):
        return part(summed(gradient, context.group), context.dim, context.group), None, None, None


class ReducedForOwnUse(torch.autograd.Function):
    """A sum over ranks becomes this rank's part of it: each addend has the gradients of all parts."""

    @staticmethod
    def forward(context, x, dim, group):
        context.dim, context.group, context.size = dim, group, x.shape[dim]
        return part(summed(x, group), dim, group)

    @staticmethod
    def backward(context, gradient):
        return joined(gradient, context.dim, context.group, context.size), None, None
