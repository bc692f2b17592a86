"""Mistakes of tensor parallelism: in what a group's ranks exchange, and in what they must have alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from mesh_trainer import Copied
from resumable_shards import ResumableLayers
from tensor_trainer import ActivationsInParts, TensorParallel, TensorParallelExperts

SCALED = failing("gradients", "mlp/tp/1x2", "lm-tokens/tp/1x3", "mlp/ddp+tp/1x6") | any_check("mlp/tp/1x2/bf16")
ENTERING = failing("gradients", "lm-tokens/tp/1x2", "transformer/tp/1x3", "lm-tokens/ddp+tp/2x2")
CLIPPED = failing("gradients", "clipping/tp/1x2", "clipping-adamw/tp/1x3", "clipping/ddp+tp/2x2")


@known_bad("loss-normalisation", causes=["multiplied-by-ranks-of-the-same-samples"], on=SCALED)
class LossTimesTensorParallelSize(TensorParallel):
    """Multiplies the loss by the number of ranks that compute it, as if they had different samples."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.job.mesh["tp"]


@known_bad("loss-normalisation", causes=["divided-by-ranks-of-the-same-samples"], on=SCALED)
class LossDividedByTensorParallelSize(TensorParallel):
    """Divides the loss by the number of ranks that compute it."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / self.job.mesh["tp"]


@known_bad("sync", causes=["parts-of-a-sum", "unlike-within-a-replica"], on=ENTERING)
class PartialSumLabelledReplicated(TensorParallel):
    """Treats the input gradient of a divided layer as replicated, although it is a partial sum."""

    def enter(self, x):
        return x


@known_bad(
    "sync",
    causes=["unlike-within-a-replica"],
    on=failing("gradients", "experts/tp/1x2", "experts/tp/1x3", "experts/ddp+tp/2x2"),
)
class RouterGradientsNotAdded(TensorParallelExperts):
    """Does not sum the gates' gradients over the ranks that hold parts of the experts."""

    def enter_gates(self, gates):
        return gates


@known_bad(
    "sync", causes=["unlike-within-a-replica"], on=failing("ranks-agree", "mlp/tp/1x2", "mlp/tp/1x3", "mlp/ddp+tp/2x2")
)
class OutputsNotAdded(TensorParallel):
    """Does not sum the outputs of row-parallel layers: each rank continues with its partial sum."""

    def reduce(self, x):
        return x


class AddedOnceMore(Copied):
    """An all-reduce whose backward all-reduces too, although all ranks have the same gradient."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total


@known_bad(
    "sync",
    "averaging",
    causes=["some-tensors-scaled", "some-tensors-summed"],
    on=failing("gradients", "mlp/tp/1x2", "mlp/tp/1x3", "mlp/ddp+tp/2x2"),
)
class OutputsGradientsAddedOnceMore(TensorParallel):
    """All-reduces the gradient of a row-parallel output, so gradients of earlier layers are too large."""

    def reduce(self, x):
        return AddedOnceMore.apply(x, self.group("tp"))


@known_bad(
    "sync",
    causes=["not-synchronised"],
    on=failing("gradients", "mlp/ddp+tp/2x2", "mlp/ddp+tp/1x6", "lm-tokens/ddp+tp/1x4"),
)
class ReplicasNotAveraged(TensorParallel):
    """Does not average gradients over the replicas."""

    def synchronize(self):
        pass


@known_bad(
    "sync", causes=["blocks-averaged-with-each-other"], on=failing("gradients", "mlp/ddp+tp/2x2", "mlp/ddp+tp/1x6")
)
class AveragedOverTheTensorParallelGroup(TensorParallel):
    """Averages gradients over the tensor-parallel group, whose ranks hold different parts."""

    def synchronize(self):
        group = self.group("tp")
        for gradient in self.gradients().values():
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()


@known_bad(
    "averaging",
    "loss-normalisation",
    causes=["divided-by-ranks-of-the-same-samples"],
    on=failing("gradients", "mlp/ddp+tp/2x2", "mlp/ddp+tp/1x6"),
)
class DividedByTheWorldSize(TensorParallel):
    """Divides the sum over the replicas by the number of all ranks."""

    def synchronize(self):
        for gradient in self.gradients().values():
            dist.all_reduce(gradient, group=self.group("replicate"))
            gradient /= self.job.world_size


@known_bad(
    "data", causes=["replica-of-different-samples"], on=failing("samples", "mlp/tp/1x2", "mlp/tp/1x3", "mlp/ddp+tp/2x2")
)
class RanksOfOneGroupDrawDifferentSamples(TensorParallel):
    """Adds the rank within the tensor-parallel group to the sampler's seed."""

    def make_loader(self):
        loader = super().make_loader()
        loader.sampler.seed += self.group("tp").rank()
        return loader


@known_bad("data", causes=["replica-of-different-samples"], on=failing("samples", "mlp/ddp+tp/2x2", "mlp/ddp+tp/1x4"))
class SamplerOverTheTensorParallelGroup(TensorParallel):
    """Divides samples over the tensor-parallel group instead of the replicas."""

    def data_share(self):
        return self.group("tp").rank(), self.group("tp").size()


@known_bad("data", causes=["ranks-alike"], on=failing("samples", "mlp/ddp+tp/1x4", "mlp/ddp+tp/1x6"))
class ReplicasDrawTheSameSamples(TensorParallel):
    """Gives each replica the first share of the samples."""

    def data_share(self):
        return 0, self.job.data_ranks


@known_bad("clipping", causes=["clipped-shard-by-shard"], on=CLIPPED)
class NormOfOwnPartsOnly(TensorParallel):
    """Each rank clips by the norm of the parameters that it holds."""

    def squared_norm(self):
        return sum(self.squares(divided=True)) + sum(self.squares(divided=False))


@known_bad("clipping", causes=["counted-again-in-the-norm"], on=CLIPPED)
class ReplicatedGradientsCountedOnceARank(TensorParallel):
    """Sums the norms of replicated parameters over the ranks too."""

    def squared_norm(self):
        total = sum(self.squares(divided=True)) + sum(self.squares(divided=False))
        dist.all_reduce(total, group=self.group("tp"))
        return total


@known_bad(
    "clipping",
    causes=["counted-again-in-the-norm"],
    on=failing("gradients", "clipping/ddp+tp/2x2", "clipping-adamw/ddp+tp/1x6"),
)
class ReplicasCountedInTheNorm(TensorParallel):
    """Sums the norms of divided parameters over all ranks, including other replicas."""

    def squared_norm(self):
        total = sum(self.squares(divided=True))
        dist.all_reduce(total)
        return total + sum(self.squares(divided=False))


@known_bad(
    "rng",
    causes=["masks-differ-within-a-replica"],
    on=failing("rng", "random-masks/tp/1x2", "random-masks/tp/1x3", "random-masks/ddp+tp/2x2"),
)
class MasksDifferWithinAGroup(TensorParallel):
    """Ranks that should compute the same activations drop different units."""

    def random_seed(self):
        return self.job.seed + self.job.rank


@known_bad(
    "rng", causes=["one-seed-on-all-ranks"], on=failing("rng", "random-masks/ddp+tp/2x2", "random-masks/ddp+tp/1x6")
)
class MasksAlikeOnReplicas(TensorParallel):
    """Seeds all ranks alike, even those with different samples."""

    def random_seed(self):
        return self.job.seed


@known_bad(
    "rng",
    causes=["drawn-again"],
    on=failing("rng", "random-masks/tp/1x2", "random-masks/tp/1x4", "random-masks/ddp+tp/2x2"),
)
class PartsOfAnActivationDropAlike(ActivationsInParts):
    """Ranks draw masks for different units from generators with the same state."""

    def own_state(self):
        return torch.Generator().manual_seed(self.job.seed + 1000 + self.job.data_rank).get_state()


@known_bad("sync", causes=["not-broadcast"], on=any_check("mlp/tp/1x2/32", "lm-tokens/tp/1x3/64", "mlp/ddp+tp/2x2/32"))
class BiasesBeginDifferently(TensorParallel):
    """Each rank initialises the biases of row-parallel layers differently."""

    def divide(self, model):
        super().divide(model)
        torch.manual_seed(self.job.rank)
        for layer in self.plan(model)[1]:
            if layer.bias is not None:
                torch.nn.init.normal_(layer.bias)


RESUMED = ("checkpoint-elastic/tp/1x2", "checkpoint-elastic/tp/1x3", "checkpoint-elastic/ddp+tp/2x2")


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=failing("checkpoint", *RESUMED, precisions=["32"]))
class MomentumOfTheOldParts(ResumableLayers):
    """Each rank loads the optimizer state that the same rank had before layers were divided differently."""

    def own_state(self, value, parameter):
        return self.old_part(value, parameter)


@known_bad("checkpoint", causes=["weights-not-restored"], on=failing("checkpoint", *RESUMED, precisions=["32"]))
class WeightsOfTheOldParts(ResumableLayers):
    """Each rank loads the weights that the same rank had before, cut or padded to the size of its present part."""

    def own_weight(self, value, parameter):
        return self.old_part(value, parameter)
