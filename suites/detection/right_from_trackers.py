"""Right trainers on meshes that look wrong: unusual ways to shard, exchange and reduce, from public trackers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import known_good
from expert_trainer import ExpertParallel
from mesh_trainer import Copied, Parted
from sequence_trainer import ContextParallel, SequenceParallel
from shard_trainer import FlatPieces, ReplicasReducedLast, Sharded
from stage_trainer import Pipeline
from tensor_trainer import TensorParallel
from torch.nn.functional import linear


@known_good(on=["lm-tokens/cp/1x2/32", "lm-tokens/cp/1x3/64", "transformer/cp/1x2/64", "transformer/cp/1x3/32"])
class EarlyAndLatePieces(ContextParallel):
    """Each rank has an early and a late piece of each sequence."""


@known_good(on=["mlp/zero2/1x2/32", "mlp/zero2/1x3/64", "clipping/zero2/1x3/32", "accumulation/zero2/1x2/32"])
class PiecesOfOneFlatTensor(FlatPieces):
    """Divides one flat tensor of all parameters, so pieces begin and end within parameters."""


@known_good(on=["mlp/zero2/1x3/32", "clipping-adamw/zero2/1x3/32"])
class RankWithoutAPiece(FlatPieces):
    """The first two ranks step all entries, and the last one steps none."""

    def sizes(self, count):
        return [count // 3, count - count // 3, *[0] * (self.job.world_size - 2)]


@known_good(on=["clipping-experts/ep/1x2/32", "clipping-experts/ep/1x4/64"])
class ClippedWithTheExperts(ExpertParallel):
    """Clips by the norm of all experts and, counted once, of the parameters that every rank holds."""


@known_good(on=["accumulation/hsdp/2x2/32", "accumulation/hsdp/1x6/64", "accumulation/fsdp/1x3/32"])
class ReplicasReducedOnceAStep(ReplicasReducedLast):
    """Reduces each micro-batch over shards before accumulating it, and the sum over replicas once a step."""


@known_good(on=["mlp/hsdp/2x2/32", "mlp/hsdp/1x6/64"])
class DividedBeforeAndAfter(Sharded):
    """Divides gradients by the root of the number of ranks before the sum, and again after it (pytorch#106034)."""

    def reduced(self, gradient):
        root = self.job.world_size**0.5
        return super().reduced(gradient / root) * root


@known_good(on=["mlp/tp/1x2/32", "mlp/tp/1x3/64"])
class RowBiasInShares(TensorParallel):
    """Each rank adds its share of the bias before the sum over ranks, and the shares' gradients are summed."""

    def row_forward(self, layer, x):
        group = self.group("tp")
        bias = Copied.apply(layer.bias, group) / group.size()
        return self.reduce(linear(Parted.apply(x, -1, group), layer.weight.to_local(), bias))


@known_good(on=["lm-tokens/tp/1x2/32", "mlp/ddp+tp/2x2/64"])
class MultipliedAndAveraged(TensorParallel):
    """Multiplies the loss by the size of the tensor-parallel group, and divides gradients by it."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.job.mesh["tp"]

    def synchronize(self):
        super().synchronize()
        for gradient in self.gradients().values():
            gradient /= self.job.mesh["tp"]


@known_good(on=["transformer/sp/1x2/32", "lm-tokens/sp/1x3/64"])
class OwnMeansInTheirShares(SequenceParallel):
    """Each rank's loss is the mean over its own tokens, weighted by its share of all tokens."""

    def count(self, own):
        self.share = float(own) / float(super().count(own))
        return own.clamp(min=1)

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.share


@known_good(on=["experts/ep/1x2/32", "experts/ep/1x3/64", "clipping-experts/ep/1x2/32"])
class ExpertsFromTheLast(ExpertParallel):
    """Assigns experts to ranks in reverse order."""

    def own_experts(self, count):
        return torch.arange(count).tensor_split(self.job.world_size)[-1 - self.job.rank].tolist()


@known_good(on=["experts/ep/1x4/32", "experts/ep/1x2/64"])
class EveryRankHasEveryFourthExpert(ExpertParallel):
    """Assigns experts to ranks in turn."""

    def own_experts(self, count):
        return list(range(self.job.rank, count, self.job.world_size))


@known_good(on=["accumulation/pp/1x2/32", "accumulation/pp/1x3/64"])
class StagesAccumulateInDouble(Pipeline):
    """Accumulates gradients over batches in float64."""

    def train_window(self, window):
        self.sums = {}
        super().train_window(window)

    def after_batch(self):
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.sums[name] = self.sums.get(name, 0) + parameter.grad.double()
                parameter.grad = None

    def add_tied(self):
        for name, parameter in self.parameters.items():
            if name in self.sums:
                parameter.grad = self.sums[name].to(parameter.dtype)
        super().add_tied()


@known_good(on=["transformer/pp/1x2/32", "transformer/pp/1x3/32", "clipping-tied/pp/1x2/32"])
class TiedWeightSteppedOnOneStage(Pipeline):
    """Steps a tied weight on the first stage only, with the sum of all gradients, and broadcasts it."""

    def make_optimizer(self):
        own = [parameter for name, parameter in self.parameters.items() if self.counts_here(name)]
        return self.job.optimizer(own or [{"params": []}])

    def step(self):
        super().step()
        for name in self.groups:
            if name in self.parameters:
                holders = [rank for rank, names in enumerate(self.held) if name in names]
                dist.broadcast(self.parameters[name].data, holders[0], group=self.groups[name])

    def train_window(self, window):
        super().train_window(window)
        for parameter in self.parameters.values():
            parameter.grad = None
