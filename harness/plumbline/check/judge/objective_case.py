"""The weights of tokens and samples in the gradient of a step, and the mistakes that explain wrong weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.options import SAMPLE_MEAN, SUM, TOKEN_MEAN
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, holds, register


@dataclass(frozen=True, eq=False)
class PassWeights:
    """The weights of the terms of one micro-batch in the gradient with which the optimizer stepped.

    ``rows`` has, for each sample, the number of its terms, the sum of their weights and whether they weigh the same. It
    is empty if the samples are unknown. ``gradient`` is what the pass added to the gradient of the step, None if that
    contains anything else.
    """

    rank: int
    micro_batch: int
    terms: float
    weight: float
    is_even: bool
    rows: tuple[tuple[float, float, bool], ...]
    gradient: Tensor | None

    @property
    def samples(self) -> int:
        """The number of samples that have a term."""
        return sum(1 for terms, _, _ in self.rows if terms)


@dataclass(frozen=True, eq=False)
class ObjectiveCase(CountedCase):
    """The weights of one step.

    ``up_to_a_factor``: only ratios are judged, because the loss has other terms too, or the script scales the gradients
    after the backward passes by a number that is not a count, as in clipping by hand. ``is_sure``: it is known which
    entries of the loss are terms.
    """

    declared: str
    step: int
    world: int
    passes: tuple[PassWeights, ...]
    up_to_a_factor: bool
    tolerance: float
    is_sure: bool = True

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        return f"{finding.message}; {description}: {hint}"

    def match(self, hypothesis: Hypothesis[Any, Match]) -> Match | None:
        match = super().match(hypothesis)
        return match and replace(match, figures={**match.figures, "advice": _ADVICE[self.declared]})

    @cached_property
    def terms(self) -> float:
        """The number of terms of all micro-batches."""
        return sum(one.terms for one in self.passes)

    @cached_property
    def samples(self) -> int:
        """The number of samples that have a term."""
        return sum(one.samples for one in self.passes)

    @property
    def is_right(self) -> bool:
        return self.is_weighted(self.right)

    def right(self, one: PassWeights, terms: float) -> float:
        """Return the right weight of ``terms`` terms: all of a micro-batch, or those of one of its samples."""
        return _weight_as(self, self.declared, one, terms)

    def is_weighted(
        self, expected: Callable[[PassWeights, float], float], *, any_factor: bool = False, by_row: bool | None = None
    ) -> bool:
        """Return whether every micro-batch, or every sample, has the expected weight."""
        factor = self.factor(expected) if any_factor or self.up_to_a_factor else 1.0
        by_row = self.declared == SAMPLE_MEAN if by_row is None else by_row
        return all(
            even and abs(weight - factor * due) <= self.tolerance * abs(factor * due)
            for one in self.passes
            for terms, weight, even in (one.rows if by_row else [(one.terms, one.weight, one.is_even)])
            if terms and math.isfinite(due := expected(one, terms))
        )

    def factor(self, expected: Callable[[PassWeights, float], float]) -> float:
        """Return the ratio of the total weight to the expected one."""
        total = sum(expected(one, one.terms) for one in self.passes if one.terms)
        return sum(one.weight for one in self.passes) / total if total else math.nan

    @property
    def counts(self) -> Mapping[str, float]:
        """The counts by which a script may divide or multiply."""
        return {
            "ranks": self.world,
            "micro-batches": len(self.passes) / self.world,
            "micro-batches of all ranks": len(self.passes),
            "tokens": self.terms,
            "samples": self.samples,
        }

    def is_count(self, factor: float) -> bool:
        """Return whether a factor is a count, its inverse, or its inverse times the number of ranks."""
        counts = [1.0, *(count for count in self.counts.values() if count)]
        sizes = [*counts, *(times / count for count in counts for times in (1.0, self.world))]
        return any(abs(factor - size) <= self.tolerance * size for size in sizes)

    @property
    def distance(self) -> float | None:
        """The distance of the gradient from that of the declared objective, relative to its norm, None if unknown."""
        if self.declared == SAMPLE_MEAN and any(one.samples > 1 for one in self.passes):
            return None  # what each sample adds to the gradient of a micro-batch is not known
        if not all(one.is_even for one in self.passes if one.terms):
            return None
        pairs = [(one, one.gradient) for one in self.passes if one.terms]
        if not pairs or any(gradient is None or not one.weight for one, gradient in pairs):
            return None
        used = torch.stack([gradient for _, gradient in pairs if gradient is not None]).sum(0)
        due = [gradient * (self.right(one, one.terms) / one.weight) for one, gradient in pairs if gradient is not None]
        gap = float((used - torch.stack(due).sum(0)).norm() / used.norm())
        return gap if math.isfinite(gap) else None


def _weight_as(case: ObjectiveCase, objective: str, one: PassWeights, terms: float) -> float:
    if objective == TOKEN_MEAN:
        return terms / case.terms
    if objective == SUM:
        return terms
    if not case.samples:
        return math.nan
    return (1.0 if terms != one.terms or one.samples == 1 else one.samples) / case.samples


def _means_of(total: float) -> Callable[[PassWeights, float], float]:
    return lambda one, terms: total * terms / one.terms


def _of_micro_batches(case: ObjectiveCase) -> Iterator[Match]:
    if case.is_weighted(_means_of(1 / len(case.passes)), by_row=False):
        yield Match(figures={"passes": counted(len(case.passes), "micro-batch", "micro-batches")})


def _is_sum_of_micro_batches(case: ObjectiveCase) -> bool:
    several = len(case.passes) > case.world and not case.up_to_a_factor
    return several and case.is_weighted(_means_of(1 / case.world), by_row=False)


def _is_mean_of_ranks(case: ObjectiveCase) -> bool:
    own = [sum(one.terms for one in case.passes if one.rank == rank) for rank in range(case.world)]
    return case.world > 1 and case.is_weighted(lambda one, terms: terms / own[one.rank] / case.world, by_row=False)


def _of(objective: str) -> Callable[[ObjectiveCase], bool]:
    def is_of(case: ObjectiveCase) -> bool:
        if case.declared == objective or (objective == SAMPLE_MEAN and not all(one.rows for one in case.passes)):
            return False
        return case.is_weighted(
            lambda one, terms: _weight_as(case, objective, one, terms), by_row=objective == SAMPLE_MEAN
        )

    return is_of


def _scaled(case: ObjectiveCase) -> Iterator[Match]:
    if case.is_weighted(case.right, any_factor=True):
        factor = case.factor(case.right)
        known: dict[str, list[str]] = {form: [] for form in ("the number of {}", "1 / the number of {}")}
        for words, number in case.counts.items():
            for form, size in zip(known, (number, 1 / number if number else 0.0), strict=True):
                if size not in (0.0, 1.0) and abs(factor / size - 1) <= case.tolerance:
                    known[form].append(words)
        told = [form.format(" or of ".join(words)) for form, words in known.items() if words]
        yield Match(figures={"factor": f"{factor:.4g}", "is": f" ({told[0]})" if told else ""})


_FAMILY = "loss-normalisation"
_BY_OBJECTIVE = "{advice}"
_ADVICE = {
    TOKEN_MEAN: "divide the sum of each micro-batch by the number of tokens of the whole step, all-reduced over ranks, "
    "and multiply by the number of ranks if their gradients are averaged",
    SAMPLE_MEAN: "average over the tokens of each sample, divide by the number of samples of the whole step, "
    "all-reduced over ranks, and multiply by the number of ranks if their gradients are averaged",
    SUM: "add up the terms without dividing them, and multiply by the number of ranks if their gradients are averaged",
}

register(
    ObjectiveCase,
    Hypothesis("mean-of-micro-batch-means", _FAMILY, _of_micro_batches,
        "it is the mean over {passes} of their own means", _BY_OBJECTIVE, 180),
    Hypothesis("sum-of-micro-batch-means", "accumulation", holds(_is_sum_of_micro_batches),
        "the means of the micro-batches of each rank are added up, not averaged", _BY_OBJECTIVE, 185),
    Hypothesis("mean-of-rank-means", _FAMILY, holds(_is_mean_of_ranks),
        "each rank divides by its own count, and the ranks' means are averaged", _BY_OBJECTIVE, 190),
    Hypothesis("mean-over-samples", _FAMILY, holds(_of(SAMPLE_MEAN)),
        "it is the mean over samples of the means over their tokens", _BY_OBJECTIVE, 170),
    Hypothesis("mean-over-tokens", _FAMILY, holds(_of(TOKEN_MEAN)),
        "it is the mean over all tokens", _BY_OBJECTIVE, 175),
    Hypothesis("scaled-by-a-constant", _FAMILY, _scaled,
        "it is {factor} × that gradient{is}", "correct the number by which the loss or the gradients are divided", 120),
    Hypothesis("samples-weighted-wrongly", _FAMILY, holds(lambda case: True),
        "the weights follow no known rule", "look at what each loss is divided by", 101),
)  # fmt: skip
