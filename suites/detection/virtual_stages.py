"""Mistakes of pipeline schedules and of virtual stages."""

from __future__ import annotations

from expect import failing, known_bad
from stage_trainer import Interleaved, Pipeline


@known_bad(
    "data",
    causes=["drawn-twice-by-a-rank"],
    on=failing("samples", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class MicroBatchUsedTwice(Pipeline):
    """Runs the first micro-batch again in place of the last one."""

    def split(self, batch):
        parts = super().split(batch)
        return [*parts[:-1], parts[0]]


@known_bad(
    "sync",
    causes=["gradient-of-another-stage"],
    on=failing("gradients", "transformer/pp/1x2", "transformer/pp/2x1", "adamw/pp/1x2"),
)
class GradientOfTheOtherVirtualStage(Interleaved):
    """A rank's two stages share a receive buffer per micro-batch, so the earlier one reads the other's gradient."""

    def train_batch(self, batch, window):
        self.buffers = {}
        super().train_batch(batch, window)

    def receive(self, rank, place):
        backward, _, number = place
        received = super().receive(rank, place)
        return self.buffers.setdefault(number, received) if backward else received


@known_bad(
    "optimizer",
    causes=["parameter-not-in-optimizer"],
    on=failing("gradients", "transformer/pp/1x2", "transformer/pp/1x3", "adamw/pp/1x2"),
)
class SecondVirtualStageNotInTheOptimizer(Interleaved):
    """Gives the optimizer only the parameters of the rank's first stage."""

    def make_optimizer(self):
        held = self.own[0].names(self.model)
        return self.job.optimizer([p for name, p in self.parameters.items() if name in held])


@known_bad(
    "clipping",
    causes=["left-out-of-the-norm"],
    on=failing("gradients", "clipping-tied/pp/1x2", "clipping-tied/pp/1x3", precisions=["32"]),
)
class NormWithoutTheSecondVirtualStage(Interleaved):
    """Counts only each rank's first stage in the norm."""

    def counts_here(self, name):
        return super().counts_here(name) and name in self.own[0].names(self.model)


@known_bad(
    "accumulation",
    "averaging",
    causes=["divided-twice", "stage-scaled"],
    on=failing("gradients", "transformer/pp/1x2", "transformer/pp/1x3", "adamw/pp/1x2"),
)
class GradientsScaledOnceAStage(Interleaved):
    """Sums losses, and divides all of a rank's gradients once for each of its stages.

    If every rank has two stages, all gradients are divided twice. If only some have two, only their gradients are too
    small.
    """

    def divisor(self, window):
        return len(window)

    def add_tied(self):
        super().add_tied()
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.job.micro_batches ** len(self.own)
