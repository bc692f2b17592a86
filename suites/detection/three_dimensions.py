"""Mistakes on meshes that combine sharding and tensor parallelism: a dimension is confused or forgotten."""

from __future__ import annotations

import torch.distributed as dist
from expect import failing, known_bad
from mesh_trainer import MeshTrainer
from three_dimensional_trainer import ThreeDimensional

PLACES = ("mlp/hsdp+tp/1x8", "mlp/hsdp+tp/4x2")
CLIPPED = ("clipping/hsdp+tp/1x8", "clipping/hsdp+tp/4x2")
NOT_REPLICATED = ("mlp/fsdp+tp/1x4", "mlp/fsdp+tp/2x2")
CLIPPED_NOT_REPLICATED = ("clipping/fsdp+tp/1x4", "clipping/fsdp+tp/2x2")


@known_bad("sync", causes=["shards-averaged-over-some-ranks"], on=failing("gradients", *PLACES, precisions=["32"]))
class ReplicasOfPartsNeverAveraged(ThreeDimensional):
    """Shards over the ``shard`` dimension only, so nothing is averaged over replicas."""

    def data_mesh(self):
        return self.mesh["shard"]


@known_bad(
    "clipping",
    causes=["norm-of-some-shards", "clipped-shard-by-shard"],
    on=failing("gradients", *CLIPPED, *CLIPPED_NOT_REPLICATED, precisions=["32"]),
)
class NormWithoutTheOtherPartsOfLayers(ThreeDimensional):
    """Sums squared norms over shards, but not over the tensor-parallel group."""

    def squared_norm(self):
        total = MeshTrainer.squared_norm(self)
        dist.all_reduce(total, group=self.group("shard"))
        return total


@known_bad("clipping", causes=["counted-again-in-the-norm"], on=failing("gradients", *CLIPPED, precisions=["32"]))
class ReplicasCountedAgainInTheNorm(ThreeDimensional):
    """Sums squared norms over the replicas too."""

    def squared_norm(self):
        return super().squared_norm() * self.group("replicate").size()


@known_bad("data", causes=["replica-of-different-samples"], on=failing("samples", *PLACES, precisions=["32"]))
class SamplesDividedAmongPartsOfLayers(ThreeDimensional):
    """Divides samples over replicas and the tensor-parallel group, not over replicas and shards."""

    def data_share(self):
        return self.group("replicate").rank() * 2 + self.group("tp").rank(), self.job.data_ranks


@known_bad("data", causes=["replica-of-different-samples"], on=failing("samples", *NOT_REPLICATED, precisions=["32"]))
class SamplesDividedAmongAllRanks(ThreeDimensional):
    """Gives each rank different samples, even ranks that hold parts of the same layers."""

    def data_share(self):
        return self.job.rank, self.job.world_size


@known_bad(
    "clipping",
    causes=["norm-of-some-shards", "clipped-shard-by-shard"],
    on=failing("gradients", *CLIPPED_NOT_REPLICATED, precisions=["32"]),
)
class NormOfOneShard(ThreeDimensional):
    """Sums squared norms over the tensor-parallel group, but not over shards."""

    def squared_norm(self):
        total = MeshTrainer.squared_norm(self)
        dist.all_reduce(total, group=self.group("tp"))
        return total
