"""Mistakes without causes of their own: the cause is right or ``unexplained``, never a guess.

If a mistake affects only some tensors, ranks or steps, the cause says so.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.oracle.oracle import Oracle, clipped, mean_gradient
from plumbline.workloads import WORKLOADS, Columns
from plumbline.workloads.generated import Generated, Recipe

UNEXPLAINED = ("unexplained",)


class Mistake:
    """A trainer without processes. All hooks are right; a mistake overrides one."""

    workload = "mlp"

    def __init__(self, cell):
        self.cell, self.world = cell, cell.processes
        self.rng = torch.Generator().manual_seed(1)
        self.last = None

    def own(self, oracle, rank, share, step):
        """Return the rank's own gradient."""
        return oracle.gradient((((share,),),))

    def handed(self, rank, owns, step):
        """Return the gradients that a rank's optimizer gets."""
        return self.mean(owns)

    def final(self, rank, every):
        """Return the weights at the end."""
        return every[rank]

    @staticmethod
    def mean(owns):
        return mean_gradient([owns])


class ScaledByChance(Mistake):
    def handed(self, rank, owns, step):
        factor = random.Random(step).uniform(0.5, 2.0)
        return {name: factor * value for name, value in self.mean(owns).items()}


class OneLayerSummed(Mistake):
    def handed(self, rank, owns, step):
        return {n: v * (self.world if n.startswith("layers.2") else 1) for n, v in self.mean(owns).items()}


class OneLayerScaledByChance(Mistake):
    def handed(self, rank, owns, step):
        factor = random.Random(step).uniform(0.5, 2.0)
        return {n: v * (factor if n.startswith("layers.2") else 1) for n, v in self.mean(owns).items()}


class StaleAtEverySecondStep(Mistake):
    def handed(self, rank, owns, step):
        mean = self.mean(owns)
        if rank == 0:
            self.before, self.last = self.last, mean
        return self.before if step % 2 else mean


class StaleNowAndThen(StaleAtEverySecondStep):
    def handed(self, rank, owns, step):
        mean = super().handed(rank, owns, 0)
        return self.before if step in (1, 2, 5) else mean


class AveragedAtTheEnd(Mistake):
    def handed(self, rank, owns, step):
        return owns[rank]

    def final(self, rank, every):
        return self.mean(every)


class SmoothedOnOneRank(Mistake):
    ranks = (1,)

    def own(self, oracle, rank, share, step):
        if rank not in self.ranks:
            return super().own(oracle, rank, share, step)
        batch = oracle.data.batch(list(share))
        outputs = oracle.model(batch)
        loss = torch.nn.functional.cross_entropy(outputs, batch["y"], label_smoothing=0.1)
        names = list(oracle.parameters)
        return dict(zip(names, torch.autograd.grad(loss, list(oracle.parameters.values())), strict=True))


class SmoothedOnEveryRank(SmoothedOnOneRank):
    ranks = (0, 1, 2)


class DecayOnOneRank(Mistake):
    def own(self, oracle, rank, share, step):
        own = super().own(oracle, rank, share, step)
        return {n: v + rank * 0.1 * oracle.parameters[n].detach() for n, v in own.items()}


class Noisy(Mistake):
    size = 0.1

    def handed(self, rank, owns, step):
        torch.manual_seed(step)
        return {
            n: v + self.size * v.norm() * torch.randn(v.shape) / v.numel() ** 0.5 for n, v in self.mean(owns).items()
        }


class SlightlyNoisy(Noisy):
    """Noise as large as bfloat16's error."""

    size = 0.003


class EntriesDropped(Mistake):
    def handed(self, rank, owns, step):
        torch.manual_seed(step)
        return {n: v * (torch.rand(v.shape) > 0.1) for n, v in self.mean(owns).items()}


class HalfInBfloat16(Mistake):
    def own(self, oracle, rank, share, step):
        if rank:
            return super().own(oracle, rank, share, step)
        rough = Oracle(WORKLOADS["mlp"], self.cell.topology.devices, PRECISIONS["bf16"])
        rough.load({n: p.detach() for n, p in oracle.parameters.items()})
        return rough.gradient((((share,),),))


class ElevenBits(torch.autograd.Function):
    """A linear layer whose products use eleven bits of each number."""

    @staticmethod
    def forward(ctx, rows, weight, bias):
        ctx.save_for_backward(rows, weight)
        return ElevenBits.of(rows) @ ElevenBits.of(weight).T + bias

    @staticmethod
    def backward(ctx, gradient):
        rows, weight = map(ElevenBits.of, ctx.saved_tensors)
        return ElevenBits.of(gradient) @ weight, ElevenBits.of(gradient).T @ rows, gradient.sum(0)

    @staticmethod
    def of(values):
        mantissa, exponent = values.frexp()
        return (mantissa * 2**11).trunc() / 2**11 * 2.0**exponent


class InTf32(Mistake):
    def own(self, oracle, rank, share, step):
        with patch.object(torch.nn.functional, "linear", ElevenBits.apply):
            return super().own(oracle, rank, share, step)


class StoodStill(Mistake):
    times = 0


class SummedAndSteppedTooFar(Mistake):
    times = 1.5

    def handed(self, rank, owns, step):
        return {n: self.world * v for n, v in self.mean(owns).items()}


class OneLayerTimes(Mistake):
    factor = 1.1

    def handed(self, rank, owns, step):
        return {n: v * (self.factor if n.startswith("layers.2") else 1) for n, v in self.mean(owns).items()}


class OneLayerTimesBeforeClipping(OneLayerTimes):
    workload = "clipping"

    def own(self, oracle, rank, share, step):
        return mean_gradient(oracle.group_gradients((((share,),),)))

    def handed(self, rank, owns, step):
        return clipped(super().handed(rank, owns, step), WORKLOADS[self.workload].clip_norm)


class OneLayerZeroedBeforeClipping(OneLayerTimesBeforeClipping):
    factor = 0.0


class OneLayerLate(StaleAtEverySecondStep):
    def handed(self, rank, owns, step):
        now = super().handed(rank, owns, 0)
        return {n: self.before[n] if step and n.startswith("layers.2") else v for n, v in now.items()}


class OneRankLate(Mistake):
    def handed(self, rank, owns, step):
        if rank == 0:
            self.before, self.last = self.last, owns[1]
        return self.mean([self.before if self.before and index == 1 else own for index, own in enumerate(owns)])

    before = None


class LayersExchanged(Mistake):
    workload = "adamw"  # it has several layers of one shape

    def handed(self, rank, owns, step):
        mean = self.mean(owns)
        shapes = {value.shape: name for name, value in mean.items()}
        return {n: mean[shapes[v.shape]] for n, v in mean.items()}


class RowsReversed(Mistake):
    def handed(self, rank, owns, step):
        return {n: v.flip(0) if n.startswith("layers.2") else v for n, v in self.mean(owns).items()}


class LeftInOnOneRank(Mistake):
    def handed(self, rank, owns, step):
        if rank == 0:
            self.made = self.mean(owns)
            if self.last:
                self.made = {n: v + self.last[n] / self.world for n, v in self.made.items()}
            self.last = self.made
        return self.made


class OneLayerInBfloat16(Mistake):
    def handed(self, rank, owns, step):
        return {n: v.bfloat16().to(v.dtype) if n == "layers.2.weight" else v for n, v in self.mean(owns).items()}


class OneLayerOfOneRankTripled(Mistake):
    def own(self, oracle, rank, share, step):
        own = super().own(oracle, rank, share, step)
        return {n: v * (3 if rank == 1 and n.startswith("layers.2") else 1) for n, v in own.items()}


class OtherData(Mistake):
    """The samples of ``ranks`` have one changed column."""

    ranks = (0, 1, 2)

    def own(self, oracle, rank, share, step):
        right = oracle.data
        oracle.data = Columns(self.changed(right.columns, list(share))) if rank in self.ranks else right
        try:
            return super().own(oracle, rank, share, step)
        finally:
            oracle.data = right


class TargetsOfNeighbours(OtherData):
    def changed(self, columns, share):
        targets = columns["y"].clone()
        targets[share] = targets[[*share[1:], share[0]]]
        return {**columns, "y": targets}


class TargetsOfNeighboursOnOneRank(TargetsOfNeighbours):
    ranks = (1,)


class InputsInBfloat16(OtherData):
    def changed(self, columns, share):
        return {**columns, "x": columns["x"].bfloat16().float()}


class SummedAtOneStep(Mistake):
    def handed(self, rank, owns, step):
        return {n: v * (self.world if step == 3 else 1) for n, v in self.mean(owns).items()}


class SummedFromOneStepOn(Mistake):
    def handed(self, rank, owns, step):
        return {n: v * (self.world if step >= 2 else 1) for n, v in self.mean(owns).items()}


class ScaledAtSomeSteps(Mistake):
    def handed(self, rank, owns, step):
        return {n: v * (0.9 if step in (1, 2, 5) else 1) for n, v in self.mean(owns).items()}


PARTIAL = {
    OneLayerTimes: "some-tensors-multiplied",
    OneLayerTimesBeforeClipping: "some-tensors-multiplied",
    OneLayerZeroedBeforeClipping: "some-zero",
    OneLayerLate: "some-parameters-one-step-late",
    OneRankLate: "some-ranks-one-step-late",
    LayersExchanged: "parameters-exchanged",
    RowsReversed: "rows-in-another-order",
    LeftInOnOneRank: "previous-step-partly-left-in",
    OneLayerInBfloat16: "rounded-to-16-bits",
    OneLayerOfOneRankTripled: "some-tensors-weighted-wrongly",
    TargetsOfNeighbours: "of-other-samples",
    TargetsOfNeighboursOnOneRank: "of-other-samples",
    InputsInBfloat16: "inputs-rounded",
    SummedAtOneStep: "summed-over-ranks",
    SummedFromOneStepOn: "summed-over-ranks",
    ScaledAtSomeSteps: "scaled-at-some-steps",
}

MISTAKES = {
    ScaledByChance: UNEXPLAINED,
    OneLayerSummed: ("some-tensors-summed",),
    OneLayerScaledByChance: UNEXPLAINED,
    StaleAtEverySecondStep: ("one-step-late",),
    StaleNowAndThen: UNEXPLAINED,
    AveragedAtTheEnd: ("not-synchronised",),
    SmoothedOnOneRank: (*UNEXPLAINED, "another-loss"),
    SmoothedOnEveryRank: (*UNEXPLAINED, "another-loss"),
    DecayOnOneRank: UNEXPLAINED,
    Noisy: UNEXPLAINED,
    SlightlyNoisy: UNEXPLAINED,
    EntriesDropped: UNEXPLAINED,
    InTf32: ("computed-in-tf32",),
    HalfInBfloat16: (*UNEXPLAINED, "computed-in-lower-precision"),
    SummedAndSteppedTooFar: ("summed-over-ranks",),
}


def trained(mistake, workload, cell):
    """Train with a mistake, and return the evidence."""
    rng, world = random.Random(0), cell.processes
    oracles = [Oracle(workload, cell.topology.devices, cell.arithmetic) for _ in range(world)]
    optimizers = [oracle.optimizer() for oracle in oracles]
    steps = [[] for _ in range(world)]
    size = workload.global_batch_size(cell.topology.devices)
    for _ in range(workload.epochs):
        order = rng.sample(range(len(oracles[0].data)), len(oracles[0].data))
        for start in range(0, len(order), size):
            shares = [tuple(share.tolist()) for share in torch.tensor(order[start : start + size]).chunk(world)]
            index = len(steps[0])
            owns = [mistake.own(oracles[rank], rank, share, index) for rank, share in enumerate(shares)]
            for rank, (oracle, share) in enumerate(zip(oracles, shares, strict=True)):
                before = {name: p.detach().clone() for name, p in oracle.parameters.items()}
                gradients = mistake.handed(rank, owns, index)
                oracle.set_gradients(gradients)
                optimizers[rank].step()
                after = {name: p.detach().clone() for name, p in oracle.parameters.items()}
                if (times := getattr(mistake, "times", 1)) != 1:
                    after = {name: before[name] + times * (value - before[name]) for name, value in after.items()}
                    oracle.load(after)
                rates = tuple(group["lr"] for group in optimizers[rank].param_groups)
                steps[rank].append(Step((MicroBatch((share,), share),), before, gradients, after, rates, False, None))
    every = [own[-1].after for own in steps]
    ranks = [RankTrace(rank, world, tuple(own)) for rank, own in enumerate(steps)]
    return Trace(tuple(replace(one, final=mistake.final(one.rank, every)) for one in ranks))


@cache
def findings_of(kind, simulation, world=3):
    cell = Cell("somebody", kind.workload, "ddp", Topology(1, world), "32", "cpu")
    found = simulation.judge(trained(kind(cell), WORKLOADS[kind.workload], cell), WORKLOADS[kind.workload], cell)
    return [finding for finding in found.values() if finding.outcome.is_bad]


def test_without_a_mistake_all_is_right(simulation):
    assert not findings_of(Mistake, simulation)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_the_first_cause_is_right_or_there_is_none(kind, world, simulation):
    first, *others = findings_of(kind, simulation, world)
    assert first.check == "gradients"
    assert first.cause in MISTAKES[kind], first.message
    independent = {"update"} if kind is SummedAndSteppedTooFar else {"stillness"} if kind is AveragedAtTheEnd else set()
    assert {finding.check for finding in others if finding.consequence_of is None} <= independent


@pytest.mark.parametrize("kind", PARTIAL, ids=lambda kind: kind.__name__)
def test_a_mistake_in_part_is_named(kind, simulation):
    first = findings_of(kind, simulation)[0]
    assert (first.check, first.cause) == ("gradients", PARTIAL[kind]), first.message


@pytest.mark.parametrize(
    ("kind", "when"), [(SummedAtOneStep, "at step 3 only"), (SummedFromOneStepOn, "from step 2 on")]
)
def test_a_mistake_of_some_steps_says_which(kind, when, simulation):
    assert when in findings_of(kind, simulation)[0].message


def test_a_mistake_of_every_second_step_says_when(simulation):
    first = findings_of(StaleAtEverySecondStep, simulation)[0]
    assert "in every second step" in first.message


def test_what_is_unexplained_has_its_figures(simulation):
    first = findings_of(EntriesDropped, simulation)[0]
    assert "× the right norm, cosine" in first.message


def test_a_second_mistake_in_the_update_stands_beside_the_first(simulation):
    found = findings_of(SummedAndSteppedTooFar, simulation)
    assert [(one.check, one.cause) for one in found if one.consequence_of is None] == [
        ("gradients", "summed-over-ranks"), ("update", "scaled-update")
    ]  # fmt: skip


def test_a_batchnorm_over_tokens_does_not_keep_other_causes_from_being_tried(simulation):
    workload = type("Tokens", (Generated,), {
        "name": "tokens", "recipe": Recipe(inputs="tokens", layers=("batchnorm",), steps_per_epoch=3, shuffle=True)
    })()  # fmt: skip
    cell = Cell("somebody", "tokens", "ddp", Topology(1, 2), "64", "cpu")
    found = simulation.judge(trained(SummedAndSteppedTooFar(cell), workload, cell), workload, cell)
    assert found["gradients"].cause == "summed-over-ranks", found["gradients"].message
    found = simulation.judge(trained(EntriesDropped(cell), workload, cell), workload, cell)
    assert found["gradients"].outcome is Outcome.FAILED, found["gradients"].message
