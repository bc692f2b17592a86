"""Mistakes of sharded and hybrid-sharded training: in reducing, clipping and restoring shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from mesh_trainer import MeshTrainer, part
from resumable_shards import ResumableShards
from shard_trainer import Sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

HYBRID = ("mlp/hsdp/2x2", "mlp/hsdp/1x6")


@known_bad("sync", causes=["not-synchronised"], on=failing("gradients", "mlp/fsdp/1x2", "mlp/fsdp/1x3", "mlp/hsdp/2x2"))
class MeshOfOneShard(MeshTrainer):
    """Each rank shards over a mesh of itself alone, so nothing is synchronised."""

    def wrap(self, model):
        super().wrap(model)
        return fully_shard(model, mesh=DeviceMesh("cpu", [self.job.rank]))

    def synchronize(self):
        pass


@known_bad("sync", causes=["shards-averaged-over-some-ranks"], on=failing("gradients", *HYBRID))
class ReplicasNeverAveraged(Sharded):
    """Averages gradients within each shard group only."""

    def reduced(self, gradient):
        dist.all_reduce(gradient, group=self.group("shard"))
        return part(gradient, 0, self.group("shard")) / self.group("shard").size()


@known_bad("sync", causes=["shards-averaged-over-some-ranks"], on=failing("gradients", *HYBRID))
class AveragedOverReplicasOnly(Sharded):
    """Averages each shard over its replicas only, so ranks with other shards do not contribute."""

    def reduced(self, gradient):
        dist.all_reduce(gradient, group=self.group("replicate"))
        return part(gradient, 0, self.group("shard")) / self.group("replicate").size()


@known_bad(
    "sync",
    causes=["shards-averaged-over-some-ranks"],
    on=failing("gradients", "mlp/fsdp/1x2", "mlp/fsdp/1x3", "mlp/hsdp/2x2"),
)
class ShardsOfOwnGradients(Sharded):
    """Each rank takes its shard from its own gradient, without reducing it."""

    def reduced(self, gradient):
        return part(gradient, 0, self.group("shard")).clone()


@known_bad("averaging", causes=["divided-by-another-count"], on=failing("gradients", *HYBRID))
class ReplicasAdded(Sharded):
    """Averages gradients over shards, but sums them over replicas."""

    def reduced(self, gradient):
        return super().reduced(gradient) * self.group("replicate").size()


@known_bad(
    "averaging", causes=["summed-over-ranks"], on=failing("gradients", "mlp/fsdp/1x2", "mlp/fsdp/1x3", "mlp/hsdp/2x2")
)
class ShardsAddedAndNotDivided(Sharded):
    """Sums gradients over all ranks without dividing."""

    def reduced(self, gradient):
        return super().reduced(gradient) * self.job.world_size


@known_bad(
    "clipping",
    causes=["clipped-shard-by-shard"],
    on=failing("gradients", "clipping/fsdp/1x2", "clipping-adamw/fsdp/1x3", "clipping/hsdp/2x2"),
)
class NormOfTheOwnShardOnly(Sharded):
    """Each rank clips by the norm of its own shards."""

    def squared_norm(self):
        return MeshTrainer.squared_norm(self)


@known_bad(
    "clipping",
    causes=["counted-again-in-the-norm"],
    on=failing("gradients", "clipping/hsdp/2x2", "clipping-adamw/hsdp/1x6"),
)
class ReplicasCountedAgain(Sharded):
    """Sums squared norms over all ranks, so replicas count more than once."""

    def squared_norm(self):
        total = super().squared_norm()
        dist.all_reduce(total, group=self.group("replicate"))
        return total


@known_bad("data", causes=["divided-along-one-dimension"], on=failing("samples", "mlp/hsdp/1x4", "mlp/hsdp/1x6"))
class ReplicasSeeTheSameSamples(Sharded):
    """Divides samples within each shard group only, so replicas see the same samples."""

    def data_share(self):
        return self.group("shard").rank(), self.job.data_ranks


@known_bad(on=any_check("mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64", "mlp/hsdp/2x2/32"))
class ShardOfANeighbor(Sharded):
    """Shifts gradients by a row before sharding them, so they belong to other rows of the weights."""

    def reduced(self, gradient):
        return super().reduced(gradient.roll(-1, 0))


BUFFERED = failing("buffers", "cnn-batchnorm/fsdp/1x2", "cnn-batchnorm/hsdp/2x2", "cnn-batchnorm/fsdp/1x3")


@known_bad("buffers", causes=["buffers-not-broadcast"], on=BUFFERED)
class BuffersOfEachShard(Sharded):
    """Never broadcasts buffers, so each rank keeps running statistics of its own samples."""

    def share_buffers(self):
        pass


@known_bad(
    "buffers",
    causes=["buffers-not-broadcast"],
    on=failing("buffers", "cnn-batchnorm/hsdp/2x2", "cnn-batchnorm/hsdp/1x6"),
)
class BuffersOfEachReplica(Sharded):
    """Broadcasts running statistics within each shard group only."""

    def share_buffers(self):
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.group("shard"))


RESUMED = ("checkpoint-elastic/fsdp/1x2", "checkpoint-elastic/fsdp/1x3", "checkpoint-elastic/hsdp/2x2")
SAME_MESH = ("checkpoint/fsdp/1x2", "checkpoint/hsdp/2x2")
RESUMED_CELLS = failing("checkpoint", *RESUMED, *SAME_MESH, precisions=["32"])


def in_another_order(value, shards):
    """Return a tensor with its shards in reverse order."""
    return torch.cat(value.chunk(shards)[::-1])


@known_bad("checkpoint", causes=["weights-not-restored"], on=RESUMED_CELLS)
class ShardsOfWeightsInAnotherOrder(ResumableShards):
    """Puts weights together from shards in reverse order."""

    def load_weights(self, saved):
        weights = {name: in_another_order(value, saved["mesh"]["shard"]) for name, value in saved["weights"].items()}
        super().load_weights({**saved, "weights": weights})


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=RESUMED_CELLS)
class ShardsOfMomentumInAnotherOrder(ResumableShards):
    """Puts the optimizer state together from shards in reverse order."""

    def own_state(self, value, parameter):
        return super().own_state(in_another_order(value, self.saved_mesh["shard"]), parameter)


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=RESUMED_CELLS)
class MomentumOfOneShardLost(ResumableShards):
    """The last rank of a shard group does not load its optimizer state."""

    def load_optimizer(self, saved):
        if self.group("shard").rank() < self.group("shard").size() - 1:
            super().load_optimizer(saved)


@known_bad("checkpoint", causes=["weights-not-restored"], on=RESUMED_CELLS)
class ShardOfOneRankNotLoaded(ResumableShards):
    """The last rank of a shard group keeps its initial weights."""

    def load_weights(self, saved):
        if self.group("shard").rank() < self.group("shard").size() - 1:
            super().load_weights(saved)


@known_bad(
    "checkpoint",
    causes=["loaded-on-some-ranks"],
    on=failing("checkpoint", "checkpoint-elastic/hsdp/2x2", "checkpoint/hsdp/2x2", precisions=["32"]),
)
class OnlyTheFirstReplicaLoads(ResumableShards):
    """Only the first replica loads weights; the others keep their initial ones."""

    def load_weights(self, saved):
        if self.group("replicate").rank() == 0:
            super().load_weights(saved)


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=failing("checkpoint", *RESUMED, precisions=["32"]))
class MomentumOfTheOldShards(ResumableShards):
    """Each rank loads the optimizer state that the same rank had on the saved mesh."""

    def own_state(self, value, parameter):
        return self.old_part(value, parameter)


@known_bad("checkpoint", causes=["weights-not-restored"], on=RESUMED_CELLS)
class WeightsOfTheFirstShard(ResumableShards):
    """Every rank loads the first rank's weights."""

    def own_weight(self, value, parameter):
        return self.first_part(value, parameter)


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=RESUMED_CELLS)
class MomentumOfTheFirstShard(ResumableShards):
    """Every rank loads its own weights, but the first rank's optimizer state."""

    def own_state(self, value, parameter):
        return self.first_part(value, parameter)
