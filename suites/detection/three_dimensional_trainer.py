"""A right trainer on a mesh of two or three dimensions: fully_shard shards the parts of tensor-parallel layers."""

from __future__ import annotations

import torch
from mesh_trainer import MeshTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ThreeDimensional(MeshTrainer):
    """Divides the two layers of a Sequential by columns and by rows; everything else is replicated."""

    def wrap(self, model):
        super().wrap(model)
        for layer in model.modules():
            if isinstance(layer, nn.Sequential):
                parallelize_module(layer, self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=self.data_mesh())

    def data_mesh(self):
        """Return the mesh of fully_shard, which averages over it and shards along its last dimension."""
        return self.mesh[tuple(name for name in self.job.mesh if name != "tp")]

    def synchronize(self):
        """Do nothing: fully_shard averages in the backward."""

    def squared_norm(self):
        by_mesh = {}
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter.grad)
        return sum(whole(nn.utils.get_total_norm(alike)) ** 2 for alike in by_mesh.values())


def whole(norm):
    """Return a norm that is reduced over the ranks."""
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
