"""Copies of a model's weights for optimizers: whole, flat, and a run of the flat copy on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Whole:
    """A float32 copy of each parameter, like apex's; ``group`` has the ranks with the same parameters."""

    def __init__(self, weights, group=None):
        self.weights, self.group = list(weights), group
        self.masters = self.copied()

    def copied(self):
        return [nn.Parameter(one.detach().float().clone()) for one in self.weights]

    def give(self, gradients):
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float().clone()

    def take(self):
        for one, master in zip(self.weights, self.masters, strict=True):
            one.copy_(master)


class Flat(Whole):
    """One flat float32 copy of all parameters."""

    def copied(self):
        return [nn.Parameter(self.run(self.joined(self.weights)).float().clone())]

    def joined(self, tensors):
        flat = torch.cat([one.detach().reshape(-1) for one in tensors])
        return functional.pad(flat, (0, -len(flat) % (3 * dist.get_world_size(self.group))))

    def run(self, flat):
        return flat

    def give(self, gradients):
        self.masters[0].grad = self.run(self.joined(gradients)).float().clone()

    def take(self):
        self.put(self.masters[0].detach())

    def put(self, flat):
        for one in self.weights:
            one.copy_(flat[: one.numel()].reshape(one.shape))
            flat = flat[one.numel() :]


class Sharded(Flat):
    """A run of the flat copy on each rank, like ZeRO's."""

    def run(self, flat):
        return flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    def take(self):
        own = self.masters[0].detach()
        runs = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(runs, own, group=self.group)
        self.put(torch.cat(runs))


class Backwards(Sharded):
    """The same with parameters in the order in which their gradients are ready, like Megatron's buffers."""

    def __init__(self, weights, group=None):
        super().__init__(reversed(list(weights)), group)

    def give(self, gradients):
        super().give(list(reversed(gradients)))


class VectorsLast(Sharded):
    """All matrices, then all vectors; most vectors start with equal values."""

    def __init__(self, weights, group=None):
        weights = list(weights)
        self.order = sorted(range(len(weights)), key=lambda number: -weights[number].dim())
        super().__init__([weights[number] for number in self.order], group)

    def give(self, gradients):
        super().give([gradients[number] for number in self.order])


class NotCopiedBack(Whole):
    def take(self):
        pass


class VectorsNotCopiedBack(Whole):
    def take(self):
        kept = [one.detach().clone() for one in self.weights]
        super().take()
        for one, before in zip(self.weights, kept, strict=True):
            if one.dim() == 1:
                one.copy_(before)


class Mixed(Whole):
    """Copies in an order that does not show which parameter each belongs to."""

    @property
    def stepped(self):
        order = sorted(range(len(self.masters)), key=lambda number: (number * 5) % 7)
        return [self.masters[number] for number in order]
