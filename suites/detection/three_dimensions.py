"""Mistakes on a mesh of replicas, shards and parts of layers: a dimension is taken for another one, or forgotten."""

from __future__ import annotations

import torch.distributed as dist
from expect import failing, known_bad
from mesh_trainer import MeshTrainer
from three_dimensional_trainer import ThreeDimensional

PLACES = ("mlp/hsdp+tp/1x8", "mlp/hsdp+tp/4x2")
CLIPPED = ("clipping/hsdp+tp/1x8", "clipping/hsdp+tp/4x2")


@known_bad("sync", on=failing("gradients", *PLACES, precisions=["32"]))
class ReplicasOfPartsNeverAveraged(ThreeDimensional):
    """Weights are sharded over the middle dimension alone, so that nothing is averaged over the outer one."""

    def data_mesh(self):
        return self.mesh["shard"]


@known_bad("clipping", on=failing("gradients", *CLIPPED, precisions=["32"]))
class NormWithoutTheOtherPartsOfLayers(ThreeDimensional):
    """The norms of shards are added, and those of the parts of a layer are not."""

    def squared_norm(self):
        total = MeshTrainer.squared_norm(self)
        dist.all_reduce(total, group=self.group("shard"))
        return total


@known_bad("clipping", on=failing("gradients", *CLIPPED, precisions=["32"]))
class ReplicasCountedAgainInTheNorm(ThreeDimensional):
    """The squares are added over the replicas too."""

    def squared_norm(self):
        return super().squared_norm() * self.group("replicate").size()


@known_bad("data", on=failing("samples", *PLACES, precisions=["32"]))
class SamplesDividedAmongPartsOfLayers(ThreeDimensional):
    """Shares of the samples are counted along the replicas and the parts of layers."""

    def data_share(self):
        return self.group("replicate").rank() * 2 + self.group("tp").rank(), self.job.data_ranks
