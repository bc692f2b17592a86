"""Mistakes of schedules: in how often a micro-batch passes, and in what the stages of one rank have to themselves."""

from __future__ import annotations

from expect import failing, known_bad
from stage_trainer import Interleaved, Pipeline


@known_bad(
    "data",
    causes=["drawn-twice-by-a-rank"],
    on=failing("samples", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class MicroBatchUsedTwice(Pipeline):
    """The first micro-batch passes once more in the place of the last one."""

    def split(self, batch):
        parts = super().split(batch)
        return [*parts[:-1], parts[0]]


@known_bad(
    "sync",
    causes=["gradient-of-another-stage"],
    on=failing("gradients", "transformer/pp/1x2", "transformer/pp/2x1", "adamw/pp/1x2"),
)
class GradientOfTheOtherVirtualStage(Interleaved):
    """Both stages of a rank receive into one buffer for each micro-batch, and the earlier one reads the other's."""

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
    """The optimizer of a rank has the parameters of its first stage."""

    def make_optimizer(self):
        held = self.own[0].names(self.model)
        return self.job.optimizer([p for name, p in self.parameters.items() if name in held])


@known_bad(
    "clipping",
    causes=["left-out-of-the-norm"],
    on=failing("gradients", "clipping-tied/pp/1x2", "clipping-tied/pp/1x3", precisions=["32"]),
)
class NormWithoutTheSecondVirtualStage(Interleaved):
    """Each rank adds the norm of its first stage alone."""

    def counts_here(self, name):
        return super().counts_here(name) and name in self.own[0].names(self.model)


@known_bad(
    "accumulation",
    "averaging",
    causes=["divided-twice", "stage-scaled"],
    on=failing("gradients", "transformer/pp/1x2", "transformer/pp/1x3", "adamw/pp/1x2"),
)
class GradientsScaledOnceAStage(Interleaved):
    """Losses are added, and a rank divides all of its gradients when each of its stages is done.

    Where every rank has two stages, all gradients are divided twice; where one has, those of a rank are too small.
    """

    def divisor(self, window):
        return len(window)

    def add_tied(self):
        super().add_tied()
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.job.micro_batches ** len(self.own)
