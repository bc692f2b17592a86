"""Right pipeline-parallel trainers, some of which look wrong."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from expect import known_good
from stage_trainer import Chunk, Interleaved, Pipeline
from torch.utils.checkpoint import checkpoint

STAGED = [
    "mlp/pp/1x2/32", "mlp/pp/1x2/64", "mlp/pp/1x2/16", "mlp/pp/1x2/bf16", "dropout/pp/1x4/32",
    "transformer/pp/1x2/32", "transformer/pp/1x4/32", "accumulation/pp/1x2/32", "clipping/pp/1x3/32",
    "adamw/pp/1x2/64", "schedule/pp/1x2/32", "random-masks/pp/1x3/32", "clipping-tied/pp/1x2/32",
    "clipping-tied/pp/1x4/32", "clipping-tied/pp/1x3/64", "mlp/balanced/1x2/32", "transformer/balanced/1x3/64",
]  # fmt: skip
NORMALISED = ["cnn-batchnorm/pp/1x2/32", "cnn-batchnorm/pp/1x4/64"]
FEW = ["mlp/pp/1x2/32", "transformer/pp/1x3/32"]


@known_good(on=STAGED)
class PipelineIn1f1b(Pipeline):
    """The unmodified pipeline, in 1F1B order."""


@known_good(on=["overflow/pp/1x2/16", "overflow-schedule/pp/1x2/16", "mlp/pp/2x1/32", "transformer/pp/2x2/32"])
class PipelineThatOverflowsOrSpansNodes(Pipeline):
    """The unmodified pipeline: all stages skip a step in which one of them overflows, and stages may span nodes."""


@known_good(on=[*NORMALISED, "lm-tokens/pp/1x2/32", "lm-tokens/pp/1x3/64"], deviates=True)
class PipelineWhoseMicroBatchesDiffer(Pipeline):
    """The unmodified pipeline, where statistics or the loss are those of a micro-batch."""


@known_good(on=["lm-tokens/pp/1x2/32", "lm-tokens/pp/1x3/64", *FEW])
class LossOfTheWholeBatch(Pipeline):
    """The last stage keeps all outputs, and computes one loss of the whole batch."""

    def order(self):
        count = self.job.micro_batches
        return [(what, self.own[0], number) for what in ("forward", "backward") for number in range(count)]

    def train_batch(self, batch, window):
        self.batch = batch
        super().train_batch(batch, window)

    def loss(self, outputs, number, batch):
        return outputs

    def take(self, chunk, number):
        if self.is_last(chunk) and number == 0:
            whole = torch.cat([self.kept[chunk.number, index][1] for index in range(self.job.micro_batches)])
            with self.job.autocast():
                total = self.job.loss(whole, self.batch)
            received = [self.kept[chunk.number, index][0] for index in range(self.job.micro_batches)]
            made = torch.autograd.grad(total, [*received, *self.parameters.values()], allow_unused=True)
            self.made = made[: len(received)]
            self.kept.update({(chunk.number, index): (None, None) for index in range(self.job.micro_batches)})
            for parameter, gradient in zip(self.parameters.values(), made[len(received) :], strict=True):
                parameter.grad = gradient
        return super().take(chunk, number)

    def backward(self, chunk, number, window):
        if not self.is_last(chunk):
            super().backward(chunk, number, window)
        else:
            self.take(chunk, number)
            self.send(self.made[number], self.chunks[chunk.number - 1].rank, (True, chunk.number - 1, number))


@known_good(on=["mlp/pp/1x2/32", "adamw/pp/1x3/64", "transformer/pp/1x2/32", "transformer/pp/1x3/32"])
class UnevenStages(Pipeline):
    """The first ranks have one block each, and the last one has all others."""

    def cut(self, blocks):
        last = self.job.world_size - 1
        return [Chunk(r, r, blocks[r : r + 1] if r < last else blocks[r:]) for r in range(last + 1)]


@known_good(on=["frozen/pp/1x2/32", "frozen/pp/1x3/32", "frozen/pp/1x3/64"])
class FrozenStage(Pipeline):
    """A stage, or a part of one, is frozen."""


@known_good(on=["mlp/pp/1x3/32", "mlp/pp/1x3/64", "schedule/pp/1x3/32", "clipping/pp/1x3/32"])
class StageWithoutParameters(Pipeline):
    """The middle stage has no parameters, so its optimizer is empty."""


@known_good(on=["mlp/pp/1x3/32", "mlp/pp/1x3/64", "schedule/pp/1x3/32"])
class StageWithoutAnOptimizer(Pipeline):
    """The middle stage has no parameters, and takes no steps."""

    def step(self):
        if self.parameters:
            super().step()


@known_good(on=["transformer/pp/1x2/32", "transformer/pp/1x4/64", "clipping-tied/pp/1x2/32"])
class TiedGradientsAddedInTheReverseOrder(Pipeline):
    """Gathers tied gradients, and adds them from the last stage to the first."""

    def add_tied(self):
        for name, parameter in self.parameters.items():
            if name in self.groups:
                parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(self.groups[name]))]
                dist.all_gather(parts, parameter.grad, group=self.groups[name])
                parameter.grad = sum(reversed(parts))


@known_good(on=["mlp/pp/1x2/32", "mlp/pp/1x2/bf16", "transformer/pp/1x2/32", "clipping-tied/pp/1x3/32"])
class InterleavedStages(Interleaved):
    """Rank 0 holds blocks 0 and 2, so it may also compute the loss."""


@known_good(on=["cnn-batchnorm/pp/1x2/32", "cnn-batchnorm/pp/1x3/64"], deviates=True)
class InterleavedStagesWithStatistics(Interleaved):
    """Interleaved stages with BatchNorm."""


class Gpipe(Pipeline):
    """Runs all forwards, and then all backwards from the last micro-batch to the first."""

    def order(self):
        count = self.job.micro_batches
        forwards = [("forward", self.own[0], number) for number in range(count)]
        return forwards + [("backward", self.own[0], number) for number in reversed(range(count))]


@known_good(on=[*FEW, "transformer/pp/1x4/bf16", "accumulation/pp/1x3/32"])
class GpipeOrder(Gpipe):
    """GPipe's order, on independent samples."""


@known_good(on=NORMALISED, deviates=True)
class GpipeOrderWithStatistics(Gpipe):
    """GPipe's order with BatchNorm."""


class Recomputing(Pipeline):
    """Recomputes activations in the backward, with the forward's masks and without updating buffers again."""

    def compute(self, chunk, x, batch):
        return checkpoint(
            super().compute, chunk, x, batch, use_reentrant=False,
            context_fn=lambda: (nullcontext(), self.with_buffers_kept()),
        )  # fmt: skip

    @contextmanager
    def with_buffers_kept(self):
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            yield
        finally:  # the recomputation may end early
            for name, buffer in self.model.named_buffers():
                buffer.copy_(kept[name])


@known_good(on=["random-masks/pp/1x2/32", "random-masks/pp/1x4/32", *FEW])
class ActivationsRecomputed(Recomputing):
    """Recomputation with the generator's state preserved."""


@known_good(on=NORMALISED, deviates=True)
class ActivationsRecomputedWithStatistics(Recomputing):
    """Recomputation with BatchNorm."""


@known_good(on=[*FEW, "random-masks/pp/1x3/32", "dropout/pp/1x2/64"])
class MicroBatchesInAnotherOrder(Pipeline):
    """All stages run the micro-batches in reverse order."""

    def split(self, batch):
        return super().split(batch)[::-1]


@known_good(on=[*FEW, "mlp/pp/1x2/64"])
class EveryFourthSampleInAMicroBatch(Pipeline):
    """Assigns samples to micro-batches in turn."""

    def split(self, batch):
        count = self.job.micro_batches
        return [{name: column[first::count] for name, column in batch.items()} for first in range(count)]


@known_good(on=[*FEW, "accumulation/pp/1x2/32"])
class GradientsDividedAtTheEnd(Pipeline):
    """Sums losses, and divides each stage's gradients before its step."""

    def divisor(self, window):
        return 1

    def add_tied(self):
        super().add_tied()
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.divided_by

    def train_window(self, window):
        self.divided_by = super().divisor(window)
        super().train_window(window)


@known_good(on=["mlp/pp/1x2/32", "mlp/pp/1x3/64"])
class LossBroadcast(Pipeline):
    """The last stage broadcasts the loss, so that all ranks report it."""

    def train_window(self, window):
        self.losses = []
        super().train_window(window)
        mean = torch.stack(self.losses).mean() if self.losses else torch.zeros(())
        dist.broadcast(mean, self.job.world_size - 1)
        self.job.log("loss", mean)

    def loss(self, outputs, number, batch):
        loss = super().loss(outputs, number, batch)
        self.losses.append(loss.detach().float())
        return loss


@known_good(on=["clipping/pp/1x2/32", "clipping/pp/1x3/64", "clipping-tied/pp/1x4/32"])
class NormOfNorms(Pipeline):
    """Gathers the stages' norms, and takes the norm of these."""

    def norm(self):
        own = self.squares().sqrt()
        every = [torch.zeros_like(own) for _ in range(self.job.world_size)]
        dist.all_gather(every, own)
        return torch.linalg.vector_norm(torch.stack(every))
