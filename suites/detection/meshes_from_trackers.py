"""Mistakes on meshes that were reported in public trackers, in addition to those in other files.

The second paragraph of a docstring is the sentence with which the judge should name the mistake. It was written before
the judge knew the mistake.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import failing, known_bad
from expert_trainer import ExpertParallel, squares
from mesh_trainer import Gathered, GatheredForOwnUse, MeshTrainer, Parted, part
from sequence_trainer import ContextParallel, SequenceParallel
from shard_trainer import FlatPieces, ReplicasReducedLast, Sharded
from stage_trainer import Pipeline
from tensor_trainer import TensorParallel
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

HYBRID = ("mlp/hsdp/2x2", "mlp/hsdp/1x6")
FLAT = ("mlp/zero2/1x2", "mlp/zero2/1x3")
TENSORS = ("mlp/tp/1x2", "mlp/tp/1x3")
EXPERTS = ("experts/ep/1x2", "experts/ep/1x4")
CLIPPED_EXPERTS = ("clipping-experts/ep/1x2", "clipping-experts/ep/1x4")


# Sharding and hybrid sharding.


@known_bad(
    "sync",
    "accumulation",
    causes=["some-micro-batches-not-synchronised"],
    on=failing("gradients", "accumulation/hsdp/2x2", "accumulation/hsdp/1x6", precisions=["32"]),
)
class FirstMicroBatchesNeverReachReplicas(ReplicasReducedLast):
    """Only the last micro-batch is reduced over replicas before it is added to the earlier ones (pytorch#125484).

    Averaged over all ranks for some micro-batches, and over a part of them for others.
    """

    def keep(self, name, own, last):
        if last:
            dist.all_reduce(own, group=self.group("replicate"))
            own = own / self.group("replicate").size()
        super().keep(name, own, last)

    def averaged(self, kept):
        return kept / self.group("shard").size()


@known_bad(
    "clipping",
    causes=["norm-of-some-shards", "clipped-shard-by-shard"],
    on=failing("gradients", "clipping/hsdp/2x2", "clipping-adamw/hsdp/1x6", precisions=["32"]),
)
class NormAlongTheReplicas(Sharded):
    """Sums the squared norms of shards over replicas, not over shards (VeOmni#184, the other way round).

    Clipped by another norm on each shard: added along the wrong dimension of the mesh.
    """

    def squared_norm(self):
        total = MeshTrainer.squared_norm(self)
        dist.all_reduce(total, group=self.group("replicate"))
        return total


@known_bad("averaging", causes=["divided-by-another-count"], on=failing("gradients", *HYBRID))
class DividedByReplicasAgain(Sharded):
    """The mean over all ranks is divided by the number of replicas once more (pytorch#155903).

    Divided by a count that is not the number of ranks.
    """

    def reduced(self, gradient):
        return super().reduced(gradient) / self.group("replicate").size()


@known_bad(
    "amp",
    causes=["rounded-to-16-bits"],
    on=failing("gradients", "mlp/fsdp/1x3", "mlp/hsdp/1x6", "lm-tokens/fsdp/1x3", precisions=["32"]),
)
class PartsAddedIn16Bits(Sharded):
    """Each hop of a ring adds in bfloat16, and the sum is divided in float32 (pytorch#106395, Megatron-LM#6199).

    Right to 16 bits.
    """

    def reduced(self, gradient):
        parts = [torch.empty_like(gradient) for _ in range(self.job.world_size)]
        dist.all_gather(parts, gradient)
        total = parts[0].bfloat16()
        for one in parts[1:]:
            total = total + one.bfloat16()
        return part(total.to(gradient.dtype), 0, self.group("shard")) / self.job.world_size


@known_bad(
    "amp",
    causes=["rounded-to-16-bits"],
    on=failing("gradients", "accumulation/fsdp/1x3", "accumulation/hsdp/1x6", precisions=["32"]),
)
class AccumulatedIn16Bits(ReplicasReducedLast):
    """Accumulates micro-batches in a bfloat16 buffer (Megatron-LM#372).

    Right to 16 bits.
    """

    def keep(self, name, own, last):
        earlier = self.kept.get(name, torch.zeros_like(own))
        self.kept[name] = (earlier + own).bfloat16().to(own.dtype)


@known_bad(
    "sync",
    "optimizer",
    causes=["shard-without-gradient"],
    on=failing("gradients", "mlp/fsdp/1x3", "lm-tokens/hsdp/2x2", precisions=["32"]),
)
class LastShardWithoutGradient(Sharded):
    """Treats the last shard of a group as padding, so its gradient is zero (DeepSpeed#487).

    Right, but zero for the shards on some ranks.
    """

    def reduced(self, gradient):
        own = super().reduced(gradient)
        return own * (self.group("shard").rank() < self.group("shard").size() - 1)


# Shards of a flat tensor.


@known_bad("sync", causes=["shards-averaged-over-some-ranks"], on=failing("gradients", *FLAT))
class PiecesOfOwnGradients(FlatPieces):
    """Each rank takes its piece from its own gradient, without reducing it (verl#7493).

    Averaged over some ranks only, for each rank's shard.
    """

    def reduced(self, whole):
        return whole


@known_bad("sync", causes=["shifted-in-a-flat-tensor"], on=failing("gradients", "mlp/zero2/1x3", "mlp/zero2/1x6"))
class PiecesOfAnUnpaddedTensor(FlatPieces):
    """Pads weights before dividing them, but not gradients (ColossalAI#5819).

    Right entries, but at other places of the flat tensor.
    """

    def piece(self, whole):
        if not hasattr(self, "own"):
            return super().piece(whole)
        size = len(whole) // self.job.world_size
        begin = min(self.job.rank * size, len(whole) - len(self.own))
        return whole[begin : begin + len(self.own)]


@known_bad(
    "clipping",
    causes=["clipped-shard-by-shard"],
    on=failing("gradients", "clipping/zero2/1x2", "clipping-adamw/zero2/1x3", precisions=["32"]),
)
class NormOfTheOwnPiece(FlatPieces):
    """Each rank clips by the norm of its piece (RLinf#1558).

    Each rank's shard is scaled by another factor.
    """

    def squared_norm(self):
        return MeshTrainer.squared_norm(self)


@known_bad(
    "sync",
    causes=["shards-one-step-late"],
    on=failing("gradients", *FLAT, precisions=["32"]),
)
class PieceOfTheStepBefore(FlatPieces):
    """The last rank steps before the reduction has written its buffer (DeepSpeed#8061).

    Right on some ranks, and the right ones of the step before for the shards on another.
    """

    late = None

    def synchronize(self):
        super().synchronize()
        if self.job.rank == self.job.world_size - 1:
            now = self.own.grad.clone()
            self.own.grad = now if self.late is None else self.late
            self.late = now


# Tensor parallelism.


class BiasBeforeTheSum(TensorParallel):
    """Each rank adds the bias, as changed by ``share``, before the sum over rows."""

    def row_forward(self, layer, x):
        own = linear(Parted.apply(x, -1, self.group("tp")), layer.weight.to_local(), self.share(layer.bias))
        return self.reduce(own)


@known_bad(
    "averaging", "loss-normalisation", causes=["some-tensors-scaled", "some-tensors-averaged-twice"],
    on=failing("gradients", *TENSORS),
)  # fmt: skip
class RowBiasDividedByTheRanks(BiasBeforeTheSum):
    """Each rank adds its share of the bias before the sum, and gets only that share's gradient (torchtitan#4332).

    Right for some parameters, and for others divided by the number of ranks of a group.
    """

    def share(self, bias):
        return bias / self.group("tp").size()


@known_bad("sync", "averaging", causes=["bias-added-on-every-rank"], on=failing("gradients", *TENSORS))
class RowBiasAddedOnEveryRank(BiasBeforeTheSum):
    """Each rank adds the whole bias before the sum (MinivLLM#80, Paddle#35186).

    Those of a model in which a bias is added once for each rank.
    """

    def share(self, bias):
        return bias


@known_bad(
    "sync",
    causes=["some-parameters-not-synchronised"],
    on=failing("gradients", "mlp/ddp+tp/2x2", "lm-tokens/ddp+tp/1x4"),
)
class WholeParametersNotAveraged(TensorParallel):
    """Averages only the gradients of divided parameters over the replicas (torchtitan#4054).

    Averaged for some parameters, and the rank's own for others.
    """

    def gradients(self):
        divided = {name for name, one in self.model.named_parameters() if isinstance(one, DTensor)}
        return {name: value for name, value in super().gradients().items() if name in divided}


@known_bad(
    "clipping",
    causes=["left-out-of-the-norm"],
    on=failing("gradients", "clipping/tp/1x2", "clipping/ddp+tp/2x2", precisions=["32"]),
)
class NormOfWholeParametersOnly(TensorParallel):
    """Computes the norm of undivided parameters only (torchtune#2420).

    Clipped by a norm without some parameters.
    """

    def squared_norm(self):
        return sum(self.squares(divided=False))


class GatheredWithTheFirstGradient(Gathered):
    """Every rank takes the first part of the gradient as its own."""

    @staticmethod
    def backward(context, gradient):
        own = part(gradient, context.dim, context.group)
        return gradient.narrow(context.dim, 0, own.shape[context.dim]), None, None, None


@known_bad("sync", causes=["blocks-of-another-rank"], on=failing("gradients", "mlp/tp/1x2", "mlp/tp/1x4"))
class ColumnsWithTheFirstGradient(TensorParallel):
    """Uses an offset of zero on every rank in the backward of a gather (Wan under VeOmni#1158).

    Right on some ranks, and on others they are another rank's block.
    """

    def column_forward(self, layer, x):
        own = linear(self.enter(x), layer.weight.to_local(), layer.bias.to_local())
        return GatheredWithTheFirstGradient.apply(own, -1, self.group("tp"), layer.out_features)


# Sequence and context parallelism.


@known_bad(
    "averaging", "loss-normalisation", causes=["some-tensors-scaled"],
    on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3"),
)  # fmt: skip
class NormsAveragedOverParts(SequenceParallel):
    """Averages gradients of normalisations over the parts of a sequence, but sums the others (gpt-neox#1259).

    Right for some parameters, and for others divided by the number of parts.
    """

    def synchronize(self):
        super().synchronize()
        for name, gradient in self.gradients().items():
            if "norm" in name:
                gradient /= self.group("sp").size()


@known_bad(
    "accumulation",
    causes=["reduced-with-every-micro-batch"],
    on=failing("gradients", "accumulation-tokens/sp/1x2", "accumulation-tokens/sp/1x3", precisions=["32"]),
)
class PartsAddedWithEveryMicroBatch(SequenceParallel):
    """A hook all-reduces the accumulated gradients after each backward (gpt-neox#1257).

    Reduced again with every micro-batch.
    """

    def after_micro_batch(self, last):
        SequenceParallel.synchronize(self)

    def synchronize(self):
        pass


class GatheredAndAveraged(GatheredForOwnUse):
    """Averages the gradients of all ranks instead of summing them."""

    @staticmethod
    def backward(context, gradient):
        own, *rest = GatheredForOwnUse.backward(context, gradient)
        return own / context.group.size(), *rest


@known_bad(
    "sync", "averaging", causes=["scaled-on-the-way-back"],
    on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3"),
)  # fmt: skip
class KeysGradientsAveraged(SequenceParallel):
    """Averages the gradients of keys and values over the ranks instead of summing them (VeOmni#1120).

    The gradient that arrives at the keys and values is divided by the number of ranks.
    """

    def gathered(self, x):
        return GatheredAndAveraged.apply(x, 1, self.group("sp"), self.length)


@known_bad(
    "data",
    causes=["positions-of-other-places", "positions-from-zero"],
    on=failing("gradients", "transformer/cp/1x2", "transformer/cp/1x3", precisions=["32"]),
)
class PiecesNumberedInOneRun(ContextParallel):
    """Numbers a rank's two pieces as if they were contiguous (Megatron-Bridge#1292).

    Those of a training in which tokens have the positions of others.
    """

    def numbers(self):
        return self.all_places.tensor_split(self.group("cp").size())[self.group("cp").rank()]


@known_bad(
    "loss-normalisation",
    causes=["means-of-parts-averaged"],
    on=failing("gradients", "lm-tokens/cp/1x2", "lm-tokens/cp/1x3"),
)
class MeanOfTheRanksMeans(ContextParallel):
    """Averages the loss over each rank's own tokens, and then over the ranks (trl#6843).

    The mean of the means over each rank's part of the sequences.
    """

    def count(self, own):
        return own * self.job.world_size


@known_bad(
    "data",
    "loss-normalisation",
    causes=["tokens-at-seams-missing"],
    on=failing("gradients", "lm-tokens/cp/1x2", "lm-tokens/sp/1x3", precisions=["32"]),
)
class LabelsAtSeamsMissing(ContextParallel):
    """Shifts labels within each piece, so the last token of a piece has none (LlamaFactory#10475).

    Those of a loss without the last token of each piece.
    """

    @property
    def along(self):
        return "cp" if "cp" in self.job.mesh else "sp"

    @property
    def pieces(self):
        return super().pieces if self.along == "cp" else (part(self.all_places, 0, self.group("sp")),)

    def loss(self, outputs, batch):
        seams = [int(piece[-1]) for piece in self.pieces if len(piece) and int(piece[-1]) < self.length - 1]
        real = batch["real"].clone()
        real[:, seams] = False
        return super().loss(outputs, {**batch, "real": real})


# Expert parallelism.


@known_bad("sync", "unused-params", causes=["lost-on-the-way-back"], on=failing("gradients", *EXPERTS))
class RouterDetached(ExpertParallel):
    """Gathers gates with a collective that has no backward (Automodel#2995).

    The router has no gradient: nothing comes back through its outputs.
    """

    def gated(self, gates):
        return gates.detach()


@known_bad("sync", causes=["router-of-own-experts"], on=failing("gradients", *EXPERTS))
class RouterOfOwnExperts(ExpertParallel):
    """Drops the gradients that other ranks' experts send back to a row's gates (transformers#48687).

    Each rank's router has the gradient of the rank's own experts only.
    """

    def gathered(self, x):
        if x.shape[1] != 4:
            return super().gathered(x)
        group = self.group("ep")
        return Gathered.apply(x, 0, group, len(x) * group.size())


@known_bad("clipping", causes=["left-out-of-the-norm"], on=failing("gradients", *CLIPPED_EXPERTS, precisions=["32"]))
class ExpertsLeftOutOfTheNorm(ExpertParallel):
    """Clips all gradients by the norm of the parameters that every rank holds (DeepSpeed#8613).

    Clipped by a norm without the parameters that only some ranks hold.
    """

    def squared_norm(self):
        return squares(self.of_the_rest())


@known_bad("clipping", causes=["norms-averaged"], on=failing("gradients", *CLIPPED_EXPERTS, precisions=["32"]))
class NormsOfRanksAveraged(ExpertParallel):
    """Averages the ranks' norms of the parameters that they hold (DeepSpeed#8478).

    Clipped by the mean of the ranks' norms.
    """

    def squared_norm(self):
        norm = squares(self.gradients()).sqrt()
        dist.all_reduce(norm)
        return (norm / self.job.world_size).square()


@known_bad("clipping", causes=["clipped-shard-by-shard"], on=failing("gradients", *CLIPPED_EXPERTS, precisions=["32"]))
class NormOfWhatARankHolds(ExpertParallel):
    """Each rank clips by the norm of the parameters that it holds (Automodel#3816, ColossalAI#2192).

    Clipped on each rank by the norm of what it holds.
    """

    def squared_norm(self):
        return squares(self.gradients())


@known_bad("sync", causes=["averaged-with-other-experts"], on=failing("gradients", *EXPERTS))
class ExpertsAveragedWithEachOther(ExpertParallel):
    """All-reduces gradients of experts over ranks that hold different experts (fairseq#4220).

    The mean over the experts that ranks hold at the same place.
    """

    def synchronize(self):
        for gradient in self.gradients().values():
            dist.all_reduce(gradient)
            gradient /= self.job.world_size


# Pipeline parallelism.


@known_bad(
    "accumulation",
    causes=["divided-again-with-every-batch"],
    on=failing("gradients", "accumulation/pp/1x2", "accumulation/pp/1x3", precisions=["32"]),
)
class ScaledWithEveryBatch(Pipeline):
    """Divides all accumulated gradients by the number of micro-batches after each batch (torchtitan#1733).

    Earlier batches of a window are divided by the micro-batches again.
    """

    def divisor(self, window):
        return len(window)

    def after_batch(self):
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.job.micro_batches


@known_bad(
    "accumulation",
    causes=["micro-batch-missing", "first-micro-batches-missing"],
    on=failing("gradients", "accumulation/pp/1x2", "accumulation/pp/1x3", precisions=["32"]),
)
class StageForgetsEarlierBatches(Pipeline):
    """The last stage zeroes its accumulated gradients before each batch (Automodel#3530).

    Without the first micro-batches, for the parameters of a stage.
    """

    def train_batch(self, batch, window):
        if self.job.rank == self.job.world_size - 1:
            self.optimizer.zero_grad()
        super().train_batch(batch, window)


@known_bad(
    "averaging", "accumulation", causes=["stage-scaled"],
    on=failing("gradients", "accumulation/pp/1x2", "accumulation/pp/1x3", precisions=["32"]),
)  # fmt: skip
class DividedByTheWindowAtEachBoundary(Pipeline):
    """Divides gradients by the number of batches in the window at each stage boundary (DeepSpeed#8152).

    Stages are scaled: each is divided once more than the one after it.
    """

    def train_window(self, window):
        self.batches = len(window)
        super().train_window(window)

    def send(self, tensor, rank, place):
        backward, *_ = place
        super().send(tensor / self.batches if backward else tensor, rank, place)


@known_bad(
    "clipping",
    causes=["norms-added"],
    on=failing("gradients", "clipping/pp/1x2", "clipping-adamw/pp/1x2", precisions=["32"]),
)
class NormsAddedUp(Pipeline):
    """Sums the stages' norms instead of their squares (SpecForge#882, norm exactness).

    Clipped by the sum of the ranks' norms.
    """

    def norm(self):
        own = self.squares().sqrt()
        dist.all_reduce(own)
        return own
