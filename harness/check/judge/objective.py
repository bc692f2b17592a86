"""Which objective was optimised: with which weight each loss term of each micro-batch and rank counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.check.evidence.training import BackwardPass, RecordedRank, RecordedStep, RecordedTraining
from harness.check.judge.accusation import accuse
from harness.check.judge.noted import failed_observers, information
from harness.check.judge.rank_layout import rank_layout
from harness.check.judge.recorded_passes import passes_of
from harness.core.finding import Finding
from harness.core.outcome import Outcome

CHECK = "objective"

EXACT = 4 * 2.0**-11
"""Relative error of a weight that is an exact number: four roundings to float16, in which a loss may be scaled, divided
and added. What is further away is no exact number: no division is said to be missing, and a note tells the weight."""

NEAR = 0.02
"""Relative error up to which a factor is taken for 1. Chosen: about five roundings to bfloat16. What is further away is
told as a factor of the script's own, and no division is said to be missing."""

ALONG = 0.9
"""Cosine from which a gradient is taken for a multiple of another one. Chosen: rounding keeps it near 1, and gradients
of other samples are far below. Under it no factor is told, and no division is said to be missing."""

_UNKNOWN = "no loss function of torch.nn.functional received a gradient in every backward pass"


@dataclass(frozen=True)
class Share:
    """One loss call in one backward pass: what it adds to the objective, the loss scale taken out."""

    function: str
    reduction: str
    terms: float
    weight: float
    value: float | None
    is_even: bool
    is_alone: bool


@dataclass(frozen=True)
class StepObjective:
    """The loss calls of one step by rank and micro-batch, one each, and whether each comes from a batch of its own.

    ``factor`` is by what the mean over ranks of the gradients was multiplied before the step, clipping taken out: not
    1 where the script divides the gradients and not the loss.
    """

    ranks: tuple[tuple[Share, ...], ...]
    batches_differ: bool
    factor: float

    @property
    def shares(self) -> list[Share]:
        """All of them, of all ranks."""
        return [share for rank in self.ranks for share in rank]

    @property
    def total(self) -> float:
        """The sum of all weights in the gradient with which the optimizer steps."""
        return self.factor * sum(share.weight for share in self.shares) / len(self.ranks)

    @property
    def rates(self) -> list[float]:
        """The weight of a single term in each call that has any."""
        return [share.weight / share.terms for share in self.shares if share.terms]

    @property
    def is_even(self) -> bool:
        """Whether every term of the step counts the same."""
        return all(share.is_even for share in self.shares) and _spread(self.rates) <= 1 + EXACT

    @property
    def gap(self) -> float | None:
        """How far the objective is from the mean over all terms, as a share of it; None where a value is unknown."""
        counted = [share for share in self.shares if share.terms]
        values = [share.value for share in counted if share.value is not None]
        weights, terms = sum(share.weight for share in counted), sum(share.terms for share in counted)
        if len(values) < len(counted) or not weights or not terms:
            return None
        used = sum(share.weight * value for share, value in zip(counted, values, strict=True)) / weights
        mean = sum(share.terms * value for share, value in zip(counted, values, strict=True)) / terms
        return abs(used - mean) / abs(mean) if mean else None


def judge_objective(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding: what was optimised, or a division by the number of micro-batches that is missing or double."""
    yield from failed_observers(training, "objective", CHECK)
    if not any(step.passes for rank in training.ranks for step in rank.steps):
        return
    averaged = rank_layout(training).is_data_parallel
    # Ranks whose gradients are not averaged, as far as is known, have objectives of their own: the first one's is told.
    ranks = training.ranks if averaged else training.ranks[:1]
    objectives = list(step_objectives(ranks))
    if not objectives:
        several = _several_losses(ranks)
        if several is not None:
            yield information(CHECK, several)
        else:
            why = f"it is not known what was optimised: {_UNKNOWN}{_tokens(ranks)}"
            yield Finding(CHECK, Outcome.SKIPPED, why)
        return
    yield _divided_wrongly(objectives) or information(CHECK, _optimised(objectives))


def step_objectives(ranks: Sequence[RecordedRank]) -> Iterator[StepObjective]:
    """Yield the objective of each step that these ranks took together, where each pass has one loss call."""
    for place in range(min((len(rank.steps) for rank in ranks), default=0)):
        steps = [rank.steps[place] for rank in ranks]
        if len({(step.optimizer, step.number) for step in steps}) > 1 or any(step.skipped for step in steps):
            continue
        shares = [_shares(step) for step in steps]
        if all(shares):
            made = tuple(tuple(own) for own in shares if own is not None)
            yield StepObjective(made, all(_has_own_batches(step) for step in steps), _factor(steps))


def _factor(steps: Sequence[RecordedStep]) -> float:
    """Return by what the mean over ranks of the local gradients was multiplied, before it was clipped."""
    first = steps[0]
    if any(one.local.shape != first.received.shape for step in steps for one in step.passes):
        return math.nan  # shards of unequal sizes
    local = sum((one.local / one.scale for step in steps for one in step.passes), torch.zeros_like(first.received))
    mean, received = local / len(steps), (first.received if first.unclipped is None else first.unclipped).nan_to_num()
    product, lengths = float(received @ mean), float(received.norm() * mean.norm())
    # What points elsewhere is no multiple: it is wrong, or not all of what arrived is known.
    return product / float(mean @ mean) if lengths and product >= ALONG * lengths else math.nan


def _several_losses(ranks: Sequence[RecordedRank]) -> str | None:
    """Return which losses each backward pass adds and how much each weighs; None where passes differ in that."""
    passes = [(one, one.facts.get("objective", {}).get("calls", ())) for rank in ranks for one in passes_of(rank)]
    kinds = {tuple(call["function"] for call in calls) for _, calls in passes}
    if len(kinds) != 1 or not (functions := kinds.pop()):
        return None
    terms = []
    for place, function in enumerate(functions):
        known = [(calls[place]["weight"], one.scale) for one, calls in passes]
        weights = sorted(weight / scale for weight, scale in known if weight is not None)
        if not weights:
            return None
        same = abs(weights[-1] - weights[0]) <= EXACT * abs(weights[-1])
        terms.append(f"{weights[0]:.4g}{'' if same else f' to {weights[-1]:.4g}'} × {function}")
    return f"optimised in each backward pass: {' + '.join(terms)}"


def _tokens(ranks: Sequence[RecordedRank]) -> str:
    """Return what the numbers of labels say about a loss that is written by hand, "" where they were not counted."""
    counts = [
        sum(tokens)
        for rank in ranks
        for one in passes_of(rank)
        if (tokens := one.facts.get("objective", {}).get("tokens"))
    ]
    if not counts or not min(counts):
        return ""
    ratio = max(counts) / min(counts)
    return (
        f"; micro-batches have {min(counts)} to {max(counts)} labels: if each one's loss is a mean of its own, a token "
        f"counts up to {ratio:.3g} × as much as another"
    )


def _shares(step: RecordedStep) -> list[Share] | None:
    """Return the one loss call of each pass; None where a pass has none or several, or shares its parameters."""
    if step.other_passes:
        return None
    shares = []
    for one in step.passes:
        noted = one.facts.get("objective", {})
        calls = noted.get("calls", ())
        if len(calls) != 1 or calls[0]["weight"] is None:
            return None
        (call,) = calls
        shares.append(
            Share(
                call["function"], call["reduction"], call["terms"], call["weight"] / one.scale, call["value"],
                call["even"], noted["alone"],
            )
        )  # fmt: skip
    return shares


def _has_own_batches(step: RecordedStep) -> bool:
    """Say whether each pass follows one forward, of the same module, with the next batch of the same loader."""
    fetched = [_fetched(one) for one in step.passes]
    if any(one is None for one in fetched):
        return False
    known = [one for one in fetched if one is not None]
    return len({one[:2] for one in known}) == 1 and len(set(known)) == len(known)


def _fetched(one: BackwardPass) -> tuple[Any, ...] | None:
    forwards = one.facts.get("batches", {}).get("forwards", ())
    if len(forwards) != 1 or forwards[0]["fetched"] is None:
        return None
    fetched = forwards[0]["fetched"]
    return forwards[0]["module"], fetched["loader"], fetched["pass"], fetched["batch"]


def _divided_wrongly(objectives: Sequence[StepObjective]) -> Finding | None:
    """Return the failure of a loss that is divided by the number of micro-batches not at all, or twice.

    Only where nothing else explains it: each micro-batch is the next batch of one loader and has one loss, a mean, and
    every one of them has exactly that weight on every rank at every step. Two losses that are added by two backward
    passes, as in a GAN, do not look like that.
    """
    counts = {len(rank) for one in objectives for rank in one.ranks}
    shares = [share for one in objectives for share in one.shares]
    count = max(counts)
    if not all(abs(one.factor - 1) <= NEAR for one in objectives):
        return None  # gradients are divided, or their length is changed, after the backward passes
    if len(counts) > 1 or count < 2 or not all(one.batches_differ for one in objectives):
        return None
    if len({(share.function, share.reduction) for share in shares}) > 1 or shares[0].reduction not in (
        "mean",
        "batchmean",
    ):
        return None
    if all(_is(share.weight, 1.0) for share in shares):
        return accuse(
            CHECK,
            f"the objective is the sum of {count} micro-batches' mean losses, of total weight {count}, not their mean",
            f"gradients are {count} × those of one batch of the same samples. Is the loss meant to be divided by the "
            f"{count} micro-batches?",
            cause="not-divided-by-micro-batches",
            family="accumulation",
        )
    # With two micro-batches a quarter may be a constant that belongs to the loss: ½ of a square, and its mean.
    if count > 2 and all(_is(share.weight, 1 / count**2) and share.is_alone for share in shares):
        return accuse(
            CHECK,
            f"each of {count} micro-batches' mean losses has the weight 1/{count**2}, in total 1/{count}",
            f"do both the script and its trainer divide the loss by the {count} micro-batches?",
            cause="divided-twice",
            family="accumulation",
        )
    return None


def _optimised(objectives: Sequence[StepObjective]) -> str:
    worst = max(objectives, key=lambda one: _spread(one.rates))
    first = worst.shares[0]
    micro, ranks = max(map(len, worst.ranks)), len(worst.ranks)
    over = [f"{micro} micro-batches" if micro > 1 else "", f"{ranks} ranks" if ranks > 1 else ""]
    of = " of ".join(filter(None, over))
    terms = sum(share.terms for share in worst.shares)
    total = worst.total
    weight = "" if math.isnan(total) or abs(total - 1) <= NEAR else f", of total weight {total:.4g}"
    if worst.is_even:
        if all(_is(rate, 1.0) for rate in worst.rates):
            return f"optimised: the sum over all {terms:g} terms of {first.function}"
        return f"optimised: the mean over all {terms:g} terms of {first.function}{weight}"
    gap = worst.gap
    apart = "" if gap is None else f"; the mean over all {terms:g} terms differs by {gap:.2%} here"
    spread = _spread(worst.rates)
    ratio = "" if spread == float("inf") else f" (a term counts up to {spread:.3g} × as much as another)"
    return f"optimised: the weighted mean of {first.function} over {of or 'unequal terms'}{weight}{apart}{ratio}"


def _spread(rates: Sequence[float]) -> float:
    least, most = min(rates, default=1.0), max(rates, default=1.0)
    return most / least if least > 0 else (1.0 if least == most else float("inf"))


def _is(number: float, exact: float) -> bool:
    return abs(number - exact) <= EXACT * abs(exact)
