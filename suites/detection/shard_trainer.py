"""A right sharded trainer: gathers whole weights for a step, and reduces gradients into shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_trainer import MeshTrainer, local, part
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call

from plumbline import FlatPart


class Sharded(MeshTrainer):
    """Shards rows of each tensor over ``shard``, and replicates them over ``replicate`` if the mesh has that."""

    def divide(self, model):
        for name, whole in list(model.named_parameters()):
            owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(owner, attribute, self.sharded(whole))

    def sharded(self, whole):
        """Return this rank's shard of a parameter."""
        own = part(whole.detach(), 0, self.group("shard")).clone()
        return nn.Parameter(self.as_shard(own, whole), requires_grad=whole.requires_grad)

    def as_shard(self, own, whole):
        """Return a DTensor of the shape of ``whole``, of which this rank has the part ``own``."""
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        shape = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(own, self.mesh, placements, run_check=False, **shape)

    whole = None
    """The gathered weights of the current window, or None between windows."""

    def compute(self, batch):
        if self.whole is None:
            named = self.model.named_parameters()
            self.whole = {name: p.full_tensor().detach().requires_grad_(p.requires_grad) for name, p in named}
        return functional_call(self.model, self.whole, (batch,))

    def synchronize(self):
        named = dict(self.model.named_parameters())
        for name, gathered in self.whole.items():
            if gathered.grad is not None:
                named[name].grad = self.as_shard(self.reduced(gathered.grad), gathered)
        self.whole = None

    def reduced(self, gradient):
        """Return this rank's shard of a gradient's mean over all ranks."""
        for name in self.job.mesh:
            dist.all_reduce(gradient, group=self.group(name))
        return part(gradient, 0, self.group("shard")) / self.job.world_size

    def squared_norm(self):
        total = torch.as_tensor(super().squared_norm())
        dist.all_reduce(total, group=self.group("shard"))
        return total

    def shards(self):
        """Return this rank's shards of the weights."""
        return [local(parameter) for parameter in self.model.parameters()]


class ReplicasReducedLast(Sharded):
    """Reduces each micro-batch over shards, and the accumulated gradients over replicas, once a step."""

    def __init__(self, job):
        super().__init__(job)
        self.kept = {}

    def after_micro_batch(self, last):
        for name, whole in self.whole.items():
            dist.all_reduce(whole.grad, group=self.group("shard"))
            self.keep(name, part(whole.grad, 0, self.group("shard")).clone(), last)
            whole.grad = None

    def keep(self, name, own, last):
        """Add a micro-batch's gradient, summed over the shard group, to those of earlier micro-batches."""
        self.kept[name] = self.kept.get(name, 0) + own

    def synchronize(self):
        named = dict(self.model.named_parameters())
        for name, whole in self.whole.items():
            named[name].grad = self.as_shard(self.averaged(self.kept.pop(name)), whole)
        self.whole = None

    def averaged(self, kept):
        """Return the mean of an accumulated gradient over all ranks."""
        if (group := self.group("replicate")) is not None:
            dist.all_reduce(kept, group=group)
        return kept / self.job.world_size


class FlatPieces(MeshTrainer):
    """Each rank's optimizer steps a piece of one flat tensor of all parameters."""

    def sizes(self, count):
        """Return how many of ``count`` entries each rank steps: equal numbers, but fewer or none on the last ranks."""
        size = -(-count // self.job.world_size)
        return [max(0, min(size, count - rank * size)) for rank in range(self.job.world_size)]

    def make_optimizer(self):
        self.parameters = dict(self.model.named_parameters())
        whole = flattened(self.parameters.values())
        self.shares = self.sizes(len(whole))
        self.begin, size = sum(self.shares[: self.job.rank]), self.shares[self.job.rank]
        self.own = self.piece(whole).clone()
        parts, offset = {}, 0
        for name, parameter in self.parameters.items():
            low, high = max(offset, self.begin), min(offset + parameter.numel(), self.begin + size)
            inside = FlatPart(self.own, low - self.begin, high - low, low - offset)
            parts[name] = inside if low < high else FlatPart(self.own, 0, 0, 0)
            offset += parameter.numel()
        self.job.parts(parts)
        return self.job.optimizer([self.own])

    def piece(self, whole):
        """Return this rank's piece of a flat tensor of all parameters."""
        return whole[self.begin : self.begin + self.shares[self.job.rank]]

    def gradients(self):
        return {"": self.own.grad}

    def synchronize(self):
        self.own.grad = self.piece(self.reduced(flattened(one.grad for one in self.parameters.values()))).clone()

    def reduced(self, whole):
        """Return the mean of a flat gradient over all ranks."""
        dist.all_reduce(whole)
        return whole / self.job.world_size

    def squared_norm(self):
        total = torch.as_tensor(super().squared_norm())
        dist.all_reduce(total)
        return total

    def step(self):
        super().step()
        pieces = [self.own.new_empty(size) for size in self.shares]
        pieces[self.job.rank] = self.own.detach()
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, rank)
        whole, offset = torch.cat(pieces), 0
        for parameter in self.parameters.values():
            parameter.data.copy_(whole[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()

    def zero_grad(self):
        super().zero_grad()
        self.model.zero_grad()


def flattened(tensors):
    """Concatenate tensors to a flat one."""
    return torch.cat([one.detach().flatten() for one in tensors])
