"""Right trainers on meshes: the base trainers of the mistakes, and others that look wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import known_good
from expert_trainer import ExpertParallel
from loop import ddp, loader, sharded, train
from mesh_trainer import Reduced
from resumable_shards import ResumableExperts, ResumableLayers, ResumableShards
from sequence_trainer import SequenceParallel
from shard_trainer import Sharded
from tensor_trainer import ActivationsInParts, TensorParallel, TensorParallelExperts
from three_dimensional_trainer import ThreeDimensional
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad


@known_good(
    on=[
        "mlp/tp/1x2/32",
        "mlp/tp/1x4/64",
        "mlp/ddp+tp/2x2/64",
        "lm-tokens/tp/1x2/32",
        "transformer/tp/1x2/64",
        "clipping/tp/1x2/32",
        "clipping/ddp+tp/2x2/32",
        "linear-exact/tp/1x2/32",
        "linear-exact/ddp+tp/2x2/32",
        "mlp/tp/1x2/bf16",
    ]
)
class LayersInParts(TensorParallel):
    """Every rank computes embeddings and normalisations by itself, and gets the same gradients of them."""


@known_good(on=["mlp/tp/1x3/32", "mlp/tp/1x3/64", "lm-tokens/tp/1x5/64", "linear-exact/tp/1x3/32"])
class UnequalParts(TensorParallel):
    """Layers do not divide evenly: a third rank has none of the two rows of ``linear-exact``."""


@known_good(
    on=[
        "lm-tokens/sp/1x2/32",
        "lm-tokens/sp/1x4/64",
        "transformer/sp/1x2/64",
        "transformer/sp/1x3/32",
        "transformer/sp/1x2/bf16",
    ]
)
class SequenceInParts(SequenceParallel):
    """Ranks have parts of unequal length, with unequal numbers of tokens."""


@known_good(
    on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64", "mlp/hsdp/2x2/32", "clipping/hsdp/2x2/32", "clipping/fsdp/1x3/64"]
)
class ShardsOfRows(Sharded):
    """Gathers weights once a step; on three ranks, shards are unequal."""


@known_good(
    on=[
        "experts/ep/1x2/32",
        "experts/ep/1x4/64",
        "experts/ep/1x2/bf16",
        "accumulation-experts/ep/1x2/32",
        "accumulation-experts/ep/1x2/bf16-true",
    ]
)
class ExpertsInParts(ExpertParallel):
    """Each rank has other experts."""


@known_good(on=["experts/ep/1x3/32", "experts/ep/1x3/64"])
class UnequalNumbersOfExperts(ExpertParallel):
    """The first rank has two of the four experts, the others one each."""


@known_good(on=["random-masks/tp/1x2/32", "random-masks/tp/1x4/64", "random-masks/ddp+tp/2x2/32"])
class MasksOfOwnUnits(ActivationsInParts):
    """Ranks that see the same samples draw different masks, each for its own units."""


@known_good(on=["experts/tp/1x2/32", "experts/tp/1x3/64", "experts/ddp+tp/2x2/64"])
class ExpertsOfPartsOfLayers(TensorParallelExperts):
    """Divides the layers of experts, and multiplies by gates before the sum over ranks."""


@known_good(on=["cnn-batchnorm/fsdp/1x2/32", "cnn-batchnorm/hsdp/2x2/64"], deviates=True)
class StatisticsOfOwnSamples(Sharded):
    """Normalises batches per rank, and broadcasts running statistics over both dimensions of the mesh."""


@known_good(
    on=[
        "checkpoint-elastic/fsdp/1x2/32",
        "checkpoint-elastic/fsdp/1x3/32",
        "checkpoint-elastic/hsdp/2x2/32",
        "checkpoint/fsdp/1x2/32",
        "checkpoint/fsdp/1x3/64",
        "checkpoint/hsdp/2x2/32",
    ]
)
class ResumedWithOtherShards(ResumableShards):
    """Saves on one mesh, and resumes on another."""


@known_good(on=["checkpoint-elastic/tp/1x2/32", "checkpoint-elastic/tp/1x3/32", "checkpoint-elastic/ddp+tp/2x2/32"])
class ResumedWithOtherLayers(ResumableLayers):
    """Resumes with layers that are divided among another number of ranks."""


@known_good(on=["checkpoint-experts/ep/1x2/32", "checkpoint-experts/ep/1x3/32", "checkpoint-experts/ep/1x4/32"])
class ResumedWithOtherExperts(ResumableExperts):
    """Resumes with other experts on each rank."""


@known_good(on=["lm-tokens/sp/1x3/32", "lm-tokens/sp/1x4/64", "transformer/sp/1x3/64"])
class PaddedToEqualParts(SequenceParallel):
    """Pads sequences to a multiple of the number of ranks, and leaves padding out of the loss."""

    def compute(self, batch):
        tokens = batch["tokens"]
        self.whole = tokens.shape[1] - 1
        padding = (0, -self.whole % self.job.world_size)
        real = batch.get("real", torch.ones_like(tokens[:, 1:], dtype=torch.bool))
        self.padded = {**batch, "tokens": pad(tokens, padding), "real": pad(real, padding)}
        return super().compute(self.padded)

    def numbers(self):
        return super().numbers().clamp(max=self.whole - 1)

    def loss(self, outputs, batch):
        return super().loss(outputs, self.padded)


class AddedFromTheLast(Reduced):
    """Adds the ranks' parts from the last rank to the first."""

    @staticmethod
    def forward(context, x, group):
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return sum(reversed(parts))


@known_good(on=["mlp/tp/1x3/32", "mlp/tp/1x4/64", "linear-exact/tp/1x4/32", "transformer/ddp+tp/2x2/32"])
class SumsInAnotherOrder(TensorParallel):
    """Adds partial results from the last rank to the first."""

    def reduce(self, x):
        return AddedFromTheLast.apply(x, self.group("tp"))


@known_good(on=["lm-tokens/tp/1x3/32", "transformer/tp/1x2/64", "transformer/ddp+tp/2x2/32"])
class AveragedWhereAlike(TensorParallel):
    """Averages the gradients of replicated parameters over the ranks, although they are equal."""

    def synchronize(self):
        super().synchronize()
        for parameter in self.model.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad, group=self.group("tp"))
                parameter.grad /= self.group("tp").size()


@known_good(on=["experts/ep/1x2/32", "experts/ep/1x4/64"])
class NoGradientOfExpertsWithoutRows(ExpertParallel):
    """An expert without rows has no gradient instead of zeros."""

    def computed(self, expert, x, rows):
        return expert(x) if len(x) else x.new_zeros(0, x.shape[1])


@known_good(
    on=[
        "mlp/hsdp+tp/1x8/32",
        "mlp/hsdp+tp/4x2/64",
        "clipping/hsdp+tp/1x8/32",
        "transformer/hsdp+tp/4x2/32",
        "mlp/fsdp+tp/2x2/64",
        "clipping/fsdp+tp/1x4/32",
    ]
)
class ReplicasOfShardsOfParts(ThreeDimensional):
    """Combines sharding with tensor parallelism, so parameters are on meshes of different dimensions."""


@known_good(on=["muon/fsdp/1x2/32", "muon/fsdp/1x3/64", "muon/fsdp/1x2/bf16", "muon/fsdp/2x2/32"])
def matrices_multiplied_in_shards(job):
    """Muon multiplies shards in bfloat16 and sums rounded products, so updates differ by several percent."""
    model = sharded(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["muon/ddp/1x2/32", "muon/ddp/1x3/64"])
def matrices_multiplied_whole(job):
    """Uses Muon where each rank has whole matrices."""
    model = ddp(job)
    train(job, model)
