"""A right trainer that holds shards: whole weights are gathered for a step, and gradients reduced into shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_trainer import MeshTrainer, local, part
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call


class Sharded(MeshTrainer):
    """Rows of each tensor are divided over ``shard``, and replicated over ``replicate``, if the mesh has that."""

    def divide(self, model):
        for name, whole in list(model.named_parameters()):
            owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(owner, attribute, self.sharded(whole))

    def sharded(self, whole):
        """Return this rank's shard of a parameter."""
        own = part(whole.detach(), 0, self.group("shard")).clone()
        return nn.Parameter(self.as_shard(own, whole), requires_grad=whole.requires_grad)

    def as_shard(self, own, whole):
        """Return this rank's part of a tensor that has the shape of ``whole``."""
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        shape = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(own, self.mesh, placements, run_check=False, **shape)

    whole = None
    """The whole weights of this window."""

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
        """Return this rank's shard of the mean over all ranks of a gradient."""
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
