"""A right trainer on a device mesh, and differentiable collectives.

A subclass defines what each rank holds. Each part of a step is a method, so that a mistake overrides one method.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler


class MeshTrainer(BaseTrainer):
    """Every rank holds the whole model; gradients are averaged by hand over the ``replicate`` dimension."""

    def wrap(self, model):
        job = self.job
        dist.init_process_group(job.comm)
        self.mesh = init_device_mesh("cpu", tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
        torch.manual_seed(self.random_seed())
        self.divide(model)
        return model

    def group(self, name):
        """Return the process group of a mesh dimension, or None if the mesh does not have it."""
        return self.mesh.get_group(name) if name in self.job.mesh else None

    def random_seed(self):
        """Return the seed for layers that draw random numbers: one for each share of the samples."""
        return self.job.seed + self.job.data_rank

    def divide(self, model):
        """Reduce the model to what this rank holds; here, all of it."""

    def data_share(self):
        """Return the index of this rank's share of the samples, and the number of shares."""
        return self.job.data_rank, self.job.data_ranks

    def make_loader(self):
        job, (share, shares) = self.job, self.data_share()
        sampler = DistributedSampler(job.dataset, shares, share, shuffle=job.shuffle, seed=job.seed)
        return DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)

    def forward(self, batch):
        self.share_buffers()
        return self.compute(batch)

    def share_buffers(self):
        """Broadcast rank 0's buffers to all ranks."""
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
    """Return this rank's part of a tensor, which is the whole tensor unless it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def summed(x, group):
    """Return the sum over a group's ranks; 16-bit numbers are added as float32, because gloo cannot add them."""
    total = x.detach().to(torch.float32 if x.element_size() < 4 else x.dtype, copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def part(x, dim, group):
    """Return this rank's part of ``x`` along a dimension, as ``torch.chunk`` divides it; it may be empty."""
    size = -(-x.shape[dim] // group.size())
    begin = min(group.rank() * size, x.shape[dim])
    return x.narrow(dim, begin, min(size, x.shape[dim] - begin))


def joined(x, dim, group, size):
    """Join all ranks' parts, which may be unequal, to a tensor of ``size`` along a dimension."""
    shape = [*x.shape]
    shape[dim] = size
    whole = x.new_zeros(shape)
    part(whole, dim, group).copy_(x.detach())
    return summed(whole, group)


class Copied(torch.autograd.Function):
    """Copies a replicated input to a divided layer; the backward sums the ranks' gradients."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, context.group), None


class Reduced(torch.autograd.Function):
    """Sums the ranks' partial results, which all ranks then use alike; the backward passes the gradient on."""

    @staticmethod
    def forward(context, x, group):
        return summed(x, group)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Parted(torch.autograd.Function):
    """Keeps this rank's part of a replicated tensor; the backward joins the ranks' gradients."""

    @staticmethod
    def forward(context, x, dim, group):
        context.dim, context.group, context.size = dim, group, x.shape[dim]
        return part(x, dim, group).clone()

    @staticmethod
    def backward(context, gradient):
        return joined(gradient, context.dim, context.group, context.size), None, None


class Gathered(torch.autograd.Function):
    """Joins all ranks' parts, which all ranks then use alike; the backward keeps this rank's part."""

    @staticmethod
    def forward(context, x, dim, group, size):
        context.dim, context.group = dim, group
        return joined(x, dim, group, size)

    @staticmethod
    def backward(context, gradient):
        return part(gradient, context.dim, context.group), None, None, None


class GatheredForOwnUse(torch.autograd.Function):
    """Joins all ranks' parts, which each rank uses differently; the backward sums, and keeps this rank's part."""

    @staticmethod
    def forward(context, x, dim, group, size):
        context.dim, context.group = dim, group
        return joined(x, dim, group, size)

    @staticmethod
    def backward(context, gradient):
        return part(summed(gradient, context.group), context.dim, context.group), None, None, None


class ReducedForOwnUse(torch.autograd.Function):
    """Sums over the ranks and keeps this rank's part; the backward joins the parts' gradients."""

    @staticmethod
    def forward(context, x, dim, group):
        context.dim, context.group, context.size = dim, group, x.shape[dim]
        return part(summed(x, group), dim, group)

    @staticmethod
    def backward(context, gradient):
        return joined(gradient, context.dim, context.group, context.size), None, None
