"""The case from which hypotheses predict: one rank's gradient at one step, for which an oracle knows the right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from plumbline.core.numbers import scale_text
from plumbline.evidence.trace import Step, Tensors, same
from plumbline.judge.causes.combinations import added, common_factor, factor_between, scaled, weighted
from plumbline.judge.causes.counterfactuals import Counterfactuals, Parts
from plumbline.judge.causes.stage_pattern import HeldParameters, StagePattern, names_in_words, ranks_in_words
from plumbline.judge.hypothesis import Hypothesis, Match
from plumbline.judge.oracle.layout import Layout
from plumbline.judge.oracle.noise import distance, in_noise, is_finite, length, norm
from plumbline.judge.oracle.oracle import clipped
from plumbline.judge.trace_analysis import ExpectedGradients, TraceAnalysis
from plumbline.judge.truth import Combination, GradientCase, SomeParameters, Weight


@dataclass(frozen=True)
class Pattern:
    """What the wrong gradients of all steps and ranks have in common.

    ``factor`` is the number that multiplies the right gradients. ``odd_factor`` is the additional factor of the tensor
    that is furthest from right. ``clip_limit`` is the norm that they would have to be clipped to, and ``clip_limits``
    the same for each rank's share (empty if shares cannot be told apart). ``steps`` counts the wrong steps, and
    ``every_step`` says whether all gradients are wrong. ``only_scaled`` says that each of several ranks has a multiple
    of the right gradient, so all shares have the right relative weight. ``stages`` says what is wrong on which ranks
    that hold one model together.
    """

    factor: float = 1.0
    odd_factor: float = 1.0
    clip_limit: float = 0.0
    clip_limits: tuple[float, ...] = ()
    steps: int = 0
    every_step: bool = False
    only_scaled: bool = False
    stages: StagePattern = field(default_factory=StagePattern)


@dataclass(frozen=True, eq=False)
class OracleGradientCase(GradientCase):
    """One rank at one step that was taken; ``index`` is the step's number."""

    analysis: TraceAnalysis
    index: int
    rank: int
    pattern: Pattern = Pattern()

    @property
    def counterfactuals(self) -> Counterfactuals:
        return self.analysis.once(Counterfactuals)

    @property
    def ranks(self) -> tuple[Step, ...]:
        return self.analysis.steps[self.index].ranks

    @property
    def step(self) -> Step:
        return self.ranks[self.rank]

    @property
    def expected(self) -> ExpectedGradients:
        return self.analysis.expected[self.index]

    @property
    def earlier_expected(self) -> Sequence[ExpectedGradients]:
        """The right gradients of the steps before, latest first."""
        return [one for index, one in reversed(self.analysis.expected.items()) if index < self.index]

    @property
    def previous(self) -> Tensors | None:
        """The gradient of the previous step on the same rank, None at the first step."""
        return self.analysis.steps[self.index - 1].ranks[self.rank].gradients if self.index else None

    @property
    def accumulate(self) -> int:
        return self.analysis.workload.accumulate

    @property
    def clip_norm(self) -> float | None:
        return self.analysis.workload.clip_norm

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def location(self) -> str:
        held = self.analysis.replicas[self.rank]
        if len(held) == 1 or self.world == 1:
            return super().location
        return f"step {self.index} on {ranks_in_words(held)}"

    @property
    def scales(self) -> Sequence[float | None]:
        return [step.scale for step in self.ranks]

    @property
    def has_shares(self) -> Sequence[bool]:
        return [all(rank < len(groups) for groups in self.expected.parts) for rank in range(self.world)]

    @property
    def has_earlier_step(self) -> bool:
        return self.previous is not None and bool(self.earlier_expected)

    @property
    def zeros(self) -> Sequence[bool]:
        return [norm(value) == 0 for value in self.observed.values()]

    @property
    def factor(self) -> float:
        return self.pattern.factor

    def predicted(self, prediction: Combination | SomeParameters) -> Iterator[Tensors]:
        """Yield the gradients that a mistake would have left, clipped as the workload asks for."""
        if isinstance(prediction, SomeParameters):
            yield from self.with_nearer(self.value(prediction.combination))
        else:
            yield self.clipped(self.value(prediction))

    def clipped(self, gradient: Tensors) -> Tensors:
        return clipped(gradient, self.clip_norm)

    def value(self, combination: Combination) -> Tensors:
        """Return a combination of the right shares, before it is clipped."""
        total = _weighted(self.expected, combination.weight)
        if combination.earlier is not None:
            total = added(total, _weighted(self.earlier_expected[0], combination.earlier))
        if combination.left_over:
            total = added(total, scaled(combination.left_over, self.previous or {}))
        return total

    @property
    def is_staged(self) -> bool:
        """Whether several ranks hold one model together."""
        return self.analysis.is_staged

    @property
    def in_stages(self) -> bool:
        """Whether these ranks are the stages of a pipeline: each holds whole layers of its own."""
        return self.is_staged and self.analysis.cell.parallelism.has_stages

    @cached_property
    def held(self) -> HeldParameters:
        holders = self.analysis.holders[self.rank]
        return HeldParameters({name: ranks for name, ranks in holders.items() if name in self.expected.contract})

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages of a pipeline hold, such as tied weights."""
        return self.held.shared if self.in_stages else {}

    @property
    def recorded(self) -> dict[int, Step]:
        """The recorded step, by rank, of each of the ranks that hold this model together."""
        return self.analysis.recorded_together(self.index, self.rank)

    @property
    def layout(self) -> Layout:
        """Which samples each group and device computed at this step."""
        return self.analysis.layouts[self.index]

    @property
    def batch_parts(self) -> int:
        """The number of micro-batches into which the backend splits one batch."""
        return self.analysis.cell.parallelism.micro_batches

    @property
    def micro_batches(self) -> int:
        return len(self.expected.parts)

    @property
    def limit(self) -> float:
        return self.analysis.limit

    @property
    def is_right(self) -> bool:
        """Whether the gradient is the contract's or one device's, within the limit, or bit for bit if required."""
        allowed = self.analysis.allowed(self.limit)
        return any(self.error(right) <= allowed for right in self.rights)

    @property
    def rights(self) -> Sequence[Tensors]:
        """The right gradients: the contract's, and what one device may compute."""
        return (self.expected.contract, *self.expected.one_device)

    def misfits(self, prediction: Combination | SomeParameters | Tensors | Match) -> Iterator[float]:
        """Yield the errors of a prediction in × noise: 0 by elimination, infinite if it repeats the evidence."""
        if isinstance(prediction, Match):
            yield 0.0
            return
        forms = self.predicted(prediction) if isinstance(prediction, Combination | SomeParameters) else [prediction]
        for one in forms:
            repeats = any(one.get(name) is value for name, value in self.observed.items())
            yield math.inf if repeats else self.error(one)

    def error(self, predicted: Tensors) -> float:
        """Return the largest error of any tensor, in × noise."""
        return max((self.error_of(name, predicted) for name in self.expected.units), default=0.0)

    def error_of(self, name: str, predicted: Tensors) -> float:
        """Return the error of one tensor, in × noise; a larger prediction has more noise."""
        right = self.expected.contract[name]
        expected = predicted.get(name, torch.zeros_like(right))
        size = norm(right)
        growth = max(1.0, norm(expected) / size) if size else 1.0
        noise = self.analysis.noise.at(name, self.expected.units[name]) * growth
        return in_noise(distance(self.observed[name], expected), noise)

    def least_error(self, name: str) -> float:
        """Return the distance of a tensor from the nearest right one, in × noise."""
        return min(self.error_of(name, right) for right in self.rights)

    @cached_property
    def observed(self) -> Tensors:
        """The gradient that the optimizer used, in float64; a tensor that is absent counts as zero."""
        return {
            name: self.step.gradients[name].double() if name in self.step.gradients else torch.zeros_like(right)
            for name, right in self.expected.contract.items()
        }

    @cached_property
    def common_factor(self) -> float:
        """The factor of most tensors, because clipping may have scaled all of them; 1 if the workload does not clip."""
        return 1.0 if self.clip_norm is None else common_factor(self.expected.raw, self.observed)

    def with_nearer(self, other: Tensors) -> Iterator[Tensors]:
        """Yield the right gradient with those tensors of ``other`` that are nearer to the observed ones.

        Yields nothing if there is no such tensor, or if all are nearer.
        """
        right, factor = self.expected.raw, self.common_factor
        nearer = {
            name: value
            for name, value in other.items()
            if name in right
            and distance(self.observed[name], factor * value) < distance(self.observed[name], factor * right[name])
        }
        if 0 < len(nearer) < len(right):
            yield self.clipped({**right, **nearer})
            if self.clip_norm is not None:  # or it happened after the clipping
                yield {**self.expected.contract, **nearer}

    def if_wrong(self, predicted: Tensors) -> Iterator[Tensors]:
        """Yield a prediction unless it is right: a mistake without effect would fit every right step."""
        right = self.expected.contract
        # Both are float64: a difference below one part in 10⁹ is rounding.
        if any(distance(predicted.get(name, 0 * value), value) > 1e-9 * norm(value) for name, value in right.items()):
            yield predicted

    @cached_property
    def is_predictable(self) -> bool:
        """Whether all ranks hold the same finite weights; otherwise they have no common gradient."""
        weights = self.ranks[0].before
        return (
            all(same(step.before, weights) for step in self.ranks[1:])
            and all(
                same(one.before, {name: self.step.before[name] for name in one.before})
                for one in self.recorded.values()
            )
            and is_finite(weights)
        )

    @property
    def is_finite(self) -> bool:
        return is_finite(self.observed)

    def own_parts(self, rank: int) -> Parts:
        """Return one rank's own part of each micro-batch in which it has one."""
        return [[groups[rank]] for groups in self.expected.parts if rank < len(groups)]

    @cached_property
    def shares(self) -> list[Tensors]:
        """The gradient of each group of samples alone, over all micro-batches."""
        return [part for groups in self.expected.parts for part in groups]

    @property
    def unused(self) -> frozenset[str]:
        """The trained parameters that the loss of some group does not depend on."""
        return frozenset(name for name in self.analysis.oracle.trained if any(name not in part for part in self.shares))

    @cached_property
    def ranks_agree(self) -> bool:
        return all(
            same(step.gradients, self.step.gradients) and same(step.before, self.step.before) for step in self.ranks
        )

    @property
    def figures(self) -> dict[str, object]:
        return {
            **super().figures,
            "rank": self.analysis.replicas[self.rank][0],  # which has the samples of its whole replica
            "scale": scale_text(self.step.scale or 1.0),
            "odd_factor": f"{self.pattern.odd_factor:.4g}",
            "batch_parts": self.batch_parts,
            "norm_rank": self._norm_rank,
            "tied": names_in_words([*self.shared]),
            "tied_holder": next((ranks_in_words(ranks[:1]) for ranks in self.shared.values()), ""),
            "tied_factor": f"{self._tied_factor:.4g}",
            **self.pattern.stages.figures,
        }

    @property
    def _norm_rank(self) -> str:
        """The rank whose norm is nearest to the norm by which the gradient seems to have been clipped."""
        raw, limit = self.expected.raw, self.clip_norm
        if not self.in_stages or not limit:
            return ""
        seen = limit / (factor_between(raw, self.observed) or limit)
        own = {rank: length({n: raw[n] for n in self.held.on(rank) & raw.keys()}) for rank in self.held.ranks}
        return ranks_in_words([min(own, key=lambda rank: abs(own[rank] - seen))])

    @property
    def _tied_factor(self) -> float:
        right = {name: value for name, value in self.expected.raw.items() if name in self.shared}
        return factor_between(right, self.observed) if right else 1.0


def _weighted(expected: ExpectedGradients, weight: Weight) -> Tensors:
    count = len(expected.parts)
    pairs = [
        (weight(rank, index, count) / len(groups) / count, part)
        for index, groups in enumerate(expected.parts)
        for rank, part in enumerate(groups)
    ]
    return weighted([part for _, part in pairs], [one for one, _ in pairs], expected.raw)


GradientHypothesis = Hypothesis[OracleGradientCase, Tensors | Match]
"""Predicts gradients as the optimizer would have received them, in float64.

A hypothesis that holds by elimination, or by other evidence than gradients, yields a ``Match``. The observed gradients
themselves are not a prediction.
"""

Gradients = Iterator[Tensors | Match]
"""What a hypothesis about gradients predicts, variant by variant."""


def multiplied(
    factors: Callable[[OracleGradientCase], Iterable[float]],
) -> Callable[[OracleGradientCase], Iterator[Tensors]]:
    """Return the prediction of the right gradient times each factor, before it is clipped."""

    def predict(case: OracleGradientCase) -> Iterator[Tensors]:
        for factor in factors(case):
            yield case.clipped(scaled(factor, case.expected.raw))

    return predict
