"""Mistakes of pipeline parallelism: within one stage, and in what stages exchange."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from stage_trainer import Pipeline
from torch.utils.checkpoint import checkpoint

TWO_AND_THREE = failing("gradients", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"])
TIED = failing("gradients", "transformer/pp/1x2", "transformer/pp/1x4")


# Single stages.


@known_bad(
    "averaging",
    causes=["stage-scaled"],
    on=TWO_AND_THREE | failing("gradients", "mlp/pp/1x2", precisions=["64", "16", "bf16"]),
)
class StageGradientDoubled(Pipeline):
    """Doubles the second stage's gradients."""

    def unscale(self):
        super().unscale()
        if self.job.rank == 1:
            for parameter in self.parameters.values():
                parameter.grad *= 2


@known_bad(
    "averaging",
    causes=["stage-scaled"],
    on=failing("gradients", "mlp/pp/1x2", "transformer/pp/1x4", "cnn-batchnorm/pp/1x3"),
)
class GradientsDoubledOnTheWay(Pipeline):
    """Doubles the gradients that a stage sends back, again at each boundary."""

    def send(self, tensor, rank, place):
        backward, *_ = place
        super().send(tensor * 2 if backward else tensor, rank, place)


@known_bad(
    "optimizer",
    causes=["stage-stepped-again"],
    on=failing("steps", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class StageSteppedTwice(Pipeline):
    """The second stage takes each step twice."""

    def step(self):
        super().step()
        if self.job.rank == 1:
            self.optimizer.step()


@known_bad("optimizer", causes=["stage-without-gradient"], on=TWO_AND_THREE)
class StageStandsStill(Pipeline):
    """Zeroes the second stage's gradients before its step."""

    def step(self):
        if self.job.rank == 1:
            self.optimizer.zero_grad(set_to_none=False)
        super().step()


@known_bad("optimizer", causes=["stage-without-gradient"], on=TWO_AND_THREE)
class StageOptimizesACopy(Pipeline):
    """Gives the second stage's optimizer copies of the parameters."""

    def make_optimizer(self):
        if self.job.rank != 1:
            return super().make_optimizer()
        return self.job.optimizer([p.detach().clone().requires_grad_() for p in self.parameters.values()])


@known_bad(
    "optimizer",
    causes=["stage-never-stepped"],
    on=failing("steps", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class StageNeverSteps(Pipeline):
    """The second stage never steps."""

    def step(self):
        if self.job.rank != 1:
            super().step()


@known_bad(
    "optimizer",
    causes=["stage-not-updated"],
    on=failing("update", "mlp/pp/1x2", "adam/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class StageRestoredAfterItsStep(Pipeline):
    """Restores the second stage's parameters right after its optimizer has stepped."""

    def make_optimizer(self):
        optimizer, kept = super().make_optimizer(), []

        def keep(*_):
            kept[:] = [parameter.detach().clone() for parameter in self.parameters.values()]

        def restore(*_):
            for parameter, before in zip(self.parameters.values(), kept, strict=True):
                parameter.data.copy_(before)

        if self.job.rank == 1:
            optimizer.register_step_pre_hook(keep)
            optimizer.register_step_post_hook(restore)
        return optimizer


@known_bad("optimizer", causes=["schedule-never-stepped"], on=["schedule/pp/1x2/32", "schedule/pp/1x3/32"])
class ScheduleOnTheFirstStageOnly(Pipeline):
    """Steps the scheduler on the first stage only."""

    def schedule(self):
        if self.job.rank == 0:
            super().schedule()


@known_bad(
    "optimizer",
    causes=["schedule-stepped-every-micro-batch"],
    on=failing("learning-rate", "schedule/pp/1x2", "schedule-windows/pp/1x3", precisions=["32"]),
)
class ScheduleSteppedWithEveryMicroBatch(Pipeline):
    """Steps the scheduler once per micro-batch."""

    def train_window(self, window):
        self.times = len(window) * self.job.micro_batches
        super().train_window(window)

    def schedule(self):
        for _ in range(self.times):
            super().schedule()


# Tied weights.


@known_bad(
    "sync",
    causes=["tied-gradients-not-added"],
    on=TIED | failing("gradients", "clipping-tied/pp/1x2", "clipping-tied/pp/1x4", precisions=["32"]),
)
class TiedGradientsNotAdded(Pipeline):
    """Does not sum tied gradients: each stage keeps its own part."""

    def add_tied(self):
        pass


@known_bad(
    "sync", causes=["tied-gradients-not-added"], on=failing("ranks-agree", "transformer/pp/1x2", "transformer/pp/1x4")
)
class TiedGradientsAddedOnTheFirstStage(Pipeline):
    """Sums tied gradients on the first stage only: the last stage keeps its own part."""

    def add_tied(self):
        own = {name: self.parameters[name].grad.clone() for name in self.groups if name in self.parameters}
        super().add_tied()
        if self.job.rank:
            for name, gradient in own.items():
                self.parameters[name].grad = gradient


@known_bad("sync", causes=["tied-gradients-not-added"], on=TIED)
class TiedGradientsAddedOnTheLastStage(Pipeline):
    """Sums tied gradients on the last stage only: the first stage keeps its own part."""

    def add_tied(self):
        own = {name: self.parameters[name].grad.clone() for name in self.groups if name in self.parameters}
        super().add_tied()
        if self.job.rank == 0:
            for name, gradient in own.items():
                self.parameters[name].grad = gradient


@known_bad("averaging", causes=["tied-gradients-scaled"], on=TIED)
class TiedGradientsAveraged(Pipeline):
    """Divides tied gradients by two, the number of stages that hold them."""

    def add_tied(self):
        super().add_tied()
        for name in self.groups:
            if name in self.parameters:
                self.parameters[name].grad /= 2


# Divisors.


@known_bad(
    "accumulation",
    causes=["not-divided-by-micro-batches"],
    on=failing("gradients", "mlp/pp/1x2", "cnn-batchnorm/pp/1x3", "accumulation/pp/1x2"),
)
class MicroBatchesSummed(Pipeline):
    """Does not divide the loss by the number of micro-batches."""

    def divisor(self, window):
        return len(window)


@known_bad(
    "accumulation",
    causes=["divided-twice"],
    on=failing("gradients", "mlp/pp/1x2", "cnn-batchnorm/pp/1x3", "lm-tokens/pp/1x2"),
)
class DividedByMicroBatchesTwice(Pipeline):
    """Divides by the number of micro-batches twice."""

    def divisor(self, window):
        return super().divisor(window) * self.job.micro_batches


@known_bad(
    "averaging",
    causes=["divided-by-the-number-of-stages"],
    on=failing("gradients", "mlp/pp/1x2", "cnn-batchnorm/pp/1x3", "accumulation/pp/1x2"),
)
class DividedByStages(Pipeline):
    """Divides the loss by the number of stages too, as if they were replicas."""

    def divisor(self, window):
        return super().divisor(window) * self.job.world_size


@known_bad(
    "averaging",
    causes=["multiplied-by-the-number-of-stages"],
    on=failing("gradients", "mlp/pp/1x2", "cnn-batchnorm/pp/1x3", precisions=["32"]),
)
class MultipliedByStages(Pipeline):
    """Multiplies the loss by the number of stages, as if gradients were averaged over them."""

    def divisor(self, window):
        return super().divisor(window) / self.job.world_size


# Micro-batches.


@known_bad(
    "accumulation",
    causes=["last-micro-batches-missing"],
    on=failing("gradients", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class LastMicroBatchWithoutABackward(Pipeline):
    """Leaves out the backward of the last micro-batch."""

    def order(self):
        return [action for action in super().order() if action != ("backward", self.own[0], self.job.micro_batches - 1)]

    def train_window(self, window):
        super().train_window(window)
        self.kept.clear()


@known_bad(
    "data",
    causes=["micro-batches-missing"],
    on=failing("samples", "mlp/pp/1x2", "transformer/pp/1x3", precisions=["32"]),
)
class LastMicroBatchDropped(Pipeline):
    """Never computes the last micro-batch."""

    def order(self):
        return [action for action in super().order() if action[2] != self.job.micro_batches - 1]


@known_bad(
    "data",
    causes=["targets-of-another-micro-batch", "micro-batches-in-another-order"],
    on=failing("gradients", "mlp/pp/1x2", "transformer/pp/1x3", "dropout/pp/1x4", precisions=["32"]),
)
class LabelsInTheReverseOrder(Pipeline):
    """The last stage splits its batch in reverse order, so labels belong to other micro-batches."""

    def split(self, batch):
        parts = super().split(batch)
        return parts[::-1] if self.job.rank == self.job.world_size - 1 else parts


@known_bad(
    "data",
    causes=["targets-of-another-micro-batch"],
    on=failing("gradients", "mlp/pp/1x2", "mlp/pp/1x3", "transformer/pp/1x3", precisions=["32"]),
)
class LabelsOfTheMicroBatchBefore(Pipeline):
    """Gives the loss the targets of the previous micro-batch."""

    def train_batch(self, batch, window):
        self.parts = self.split(batch)
        super().train_batch(batch, window)

    def loss(self, outputs, number, batch):
        return super().loss(outputs, number, self.parts[number - 1])


@known_bad(
    "data",
    causes=["activations-of-another-micro-batch"],
    on=failing("gradients", "mlp/pp/1x2", "mlp/pp/1x3", "cnn-batchnorm/pp/1x2", precisions=["32"]),
)
class ActivationsOfAnotherMicroBatch(Pipeline):
    """The first stage goes back through the newest activations first, but gradients arrive for the oldest."""

    def order(self):
        count = self.job.micro_batches
        return [(what, self.own[0], number) for what in ("forward", "backward") for number in range(count)]

    def take(self, chunk, number):
        return super().take(chunk, number if self.job.rank else self.job.micro_batches - 1 - number)


@known_bad(
    "data",
    causes=["activations-of-another-micro-batch"],
    on=failing("gradients", "mlp/pp/1x2", "mlp/pp/1x3", precisions=["32"]),
)
class OneGradientForAllMicroBatches(Pipeline):
    """The first stage uses the first micro-batch's gradient for all micro-batches."""

    def receive(self, rank, place):
        backward, _, number = place
        received = super().receive(rank, place)
        if self.job.rank or not backward:
            return received
        if number == 0:
            self.buffer = received
        return self.buffer


# Side effects of a forward.


class Recomputing(Pipeline):
    """Recomputes activations in the backward."""

    preserve_rng_state = True

    def compute(self, chunk, x, batch):
        return checkpoint(
            super().compute, chunk, x, batch, use_reentrant=False, preserve_rng_state=self.preserve_rng_state
        )


@known_bad(
    "buffers",
    causes=["statistics-updated-again"],
    on=failing("buffers", "cnn-batchnorm/pp/1x2", "cnn-batchnorm/pp/1x3"),
)
class StatisticsUpdatedByTheRecomputation(Recomputing):
    """Updates BatchNorm statistics again when it recomputes activations."""


@known_bad(
    "buffers",
    causes=["statistics-updated-again"],
    on=failing("buffers", "cnn-batchnorm/pp/1x2", "cnn-batchnorm/pp/1x4"),
)
class StatisticsUpdatedTwiceInTheForward(Pipeline):
    """Runs each forward twice, the first time without gradients."""

    def compute(self, chunk, x, batch):
        with torch.no_grad(), self.job.trial():
            super().compute(chunk, x, batch)
        return super().compute(chunk, x, batch)


@known_bad(
    "buffers",
    causes=["statistics-updated-again"],
    on=failing("buffers", "cnn-batchnorm/pp/1x2", "cnn-batchnorm/pp/1x3", precisions=["32"]),
)
class StatisticsUpdatedBeforeTheFirstStep(Pipeline):
    """Runs the first micro-batch once more before training, to infer shapes."""

    begun = False

    def train_window(self, window):
        if not self.begun:
            with torch.no_grad(), self.job.trial():
                for chunk in self.own:
                    self.forward(chunk, 63, self.split(window[0])[0])
            self.kept.clear()
        self.begun = True
        super().train_window(window)


@known_bad(
    "buffers",
    causes=["statistics-updated-again"],
    on=failing("buffers", "cnn-batchnorm/pp/1x2", "cnn-batchnorm/pp/1x3", precisions=["32"]),
)
class StatisticsUpdatedByShapeInference(Pipeline):
    """Runs the first micro-batch of each batch once more, to infer shapes."""

    def forward(self, chunk, number, batch):
        if number == 0:
            with self.unseen():
                super().forward(chunk, 63, batch)
                self.kept.clear()
        super().forward(chunk, number, batch)

    @contextmanager
    def unseen(self):
        with torch.no_grad(), self.job.trial():
            yield


@known_bad(
    "rng",
    causes=["masks-drawn-anew-in-the-backward"],
    on=failing("rng", "random-masks/pp/1x2", "random-masks/pp/1x4", precisions=["32"]),
)
class MasksDrawnAnewByTheRecomputation(Recomputing):
    """Recomputes activations without preserving the generator's state."""

    preserve_rng_state = False


# Clipping.


@known_bad(
    "clipping",
    causes=["clipped-stage-by-stage"],
    on=failing("gradients", "clipping/pp/1x2", "clipping/pp/1x3", "clipping-adamw/pp/1x2"),
)
class ClippedByTheNormOfTheOwnStage(Pipeline):
    """Each stage clips by its own norm."""

    def norm(self):
        return self.squares().sqrt()


@known_bad(
    "clipping",
    causes=["clipped-by-the-norm-of-one-stage"],
    on=failing("gradients", "clipping/pp/1x2", "clipping/pp/1x3", "clipping-adamw/pp/1x2"),
)
class ClippedByTheNormOfTheLastStage(Pipeline):
    """All stages clip by the last stage's norm."""

    def norm(self):
        squares = self.squares()
        dist.broadcast(squares, self.job.world_size - 1)
        return squares.sqrt()


@known_bad(
    "clipping",
    causes=["shared-parameter-counted-again"],
    on=failing("gradients", "clipping-tied/pp/1x2", "clipping-tied/pp/1x3", "clipping-tied/pp/1x4"),
)
class TiedWeightsCountedTwiceInTheNorm(Pipeline):
    """Counts a tied weight in the norm of every stage that holds it."""

    def counts_here(self, name):
        return True


@known_bad("clipping", causes=["stage-not-clipped"], on=any_check("clipping/pp/1x2/32", "clipping-tied/pp/1x4/32"))
class NotClippedOnTheLastStage(Pipeline):
    """Clips on all stages but the last."""

    def clip(self):
        if self.job.rank < self.job.world_size - 1:
            super().clip()
        else:
            self.norm()
