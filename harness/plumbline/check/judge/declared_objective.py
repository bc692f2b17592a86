"""Checks the gradient against the objective that the user declared, over all ranks and micro-batches of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.options import SAMPLE_MEAN, SUM, TOKEN_MEAN
from plumbline.check.evidence.training import BackwardPass, Facts, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import amount, not_judged
from plumbline.check.judge.rank_weights import rank_layout
from plumbline.check.judge.step_objective import EXACT, NEAR, calls_of_one_loss, received_by, steps_together
from plumbline.check.rank.observers.loss_functions import CLASSES
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import passed
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, explain, holds, register
from plumbline.report.text import in_two_digits


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


CHECK = "objective"

ROUNDED = {"bfloat16": 4 * 2.0**-8}
"""Like ``EXACT``, for losses that are computed in a format with fewer digits than float16."""

MOST_TOLD = 6
"""The largest number of weights that a message lists one by one."""

_NAMES = {TOKEN_MEAN: "mean over all tokens", SAMPLE_MEAN: "mean over all samples", SUM: "sum over all tokens"}


class _UnknownError(Exception):
    """The objective of a step is unknown; the message says why."""


def judge_declared(training: RecordedTraining) -> Iterator[Finding]:
    """Yield whether the gradient of each step is that of the declared objective, or why this is unknown."""
    layout = rank_layout(training)
    if training.world_size > 1 and not layout.is_data_parallel:
        yield not_judged(
            CHECK, f"an objective over all ranks can be judged under data parallelism only; here, {layout.reason}"
        )
        return
    cases: list[Sequence[ObjectiveCase]] = []
    reasons = []
    for steps in steps_together(training.ranks):
        try:
            readings = _cases(training.objective, steps)
            if not all(one.is_sure or one.is_right for one in readings):
                raise _UnknownError(
                    "it is not known which entries of the loss are tokens: a custom function or a mask may skip some, "
                    "and several calls may be chunks of one loss or several losses"
                )
            cases.append(readings)
        except _UnknownError as error:
            reasons.append(str(error))
    wrong = next((readings[0] for readings in cases if not any(one.is_right for one in readings)), None)
    if wrong is not None:
        yield explain(_failed(wrong), wrong)
    elif cases:
        worst = next(one for one in cases[-1] if one.is_right)
        yield passed(CHECK, f"in {counted(len(cases), 'step')}, {_trained(worst)}")
    else:
        yield not_judged(CHECK, reasons[0] if reasons else "no step was recorded")


def _trained(case: ObjectiveCase) -> str:
    micro = max(one.micro_batch for one in case.passes) + 1
    over = f"over {counted(micro, 'micro-batch', 'micro-batches')}"
    over += f" on each of {case.world} ranks" if case.world > 1 else ""
    up_to = ", up to a common factor" if case.up_to_a_factor else ""
    least, most = (some(one.terms for one in case.passes) for some in (min, max))
    size = f"{amount(least)} to {amount(most)} tokens"
    if least == most:
        size = f"{amount(most)} tokens"
        size += ", so the mean of the means of micro-batches would be the same" if case.declared == TOKEN_MEAN else ""
    return f"the gradient is that of the {_NAMES[case.declared]} {over}{up_to}; micro-batches have {size}"


def _failed(case: ObjectiveCase) -> Finding:
    gap, due = case.distance, f"that of the {_NAMES[case.declared]}"
    apart = f"is not {due}" if gap is None else f"differs from {due} by about {in_two_digits(gap)} of its norm"
    observed = f"the gradient at step {case.step} {apart}: {_weights(case)}"
    return Finding(CHECK, Outcome.FAILED, observed, step=case.step)


def _weights(case: ObjectiveCase) -> str:
    """Return the weight of a token, or of a sample, of each micro-batch in words, and what it should be."""
    by_sample = case.declared == SAMPLE_MEAN
    what = "sample" if by_sample else "token"
    factor = case.factor(case.right) if case.up_to_a_factor else 1.0
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for one in case.passes:
        units = [row[1] for row in one.rows if row[0]] if by_sample else [one.weight / one.terms] if one.terms else []
        if units:
            found[one.rank, one.micro_batch] = min(units), max(units)
    right = factor * (1.0 if case.declared == SUM else 1 / (case.samples if by_sample else case.terms))
    values = {(f"{least:.4g}", f"{most:.4g}") for least, most in found.values()}
    if len(values) == 1 and len(next(iter(map(set, values)))) == 1:
        return f"each {what} weighs {next(iter(values))[0]} instead of {right:.4g}"
    told: dict[str, str] = {}
    for (rank, micro), (least, most) in found.items():
        size = f"{least:.4g}" if f"{least:.4g}" == f"{most:.4g}" else f"{least:.4g} to {most:.4g}"
        told[_place(case, rank, micro)] = size
    for rank in range(case.world if case.world > 1 else 0):
        own = {place: told[place] for place in (_place(case, rank, micro) for on, micro in found if on == rank)}
        if len(own) > 1 and len(set(own.values())) == 1:
            told = {place: size for place, size in told.items() if place not in own}
            told[f"on rank {rank}"] = next(iter(own.values()))
    relation = " relative to the others" if case.up_to_a_factor else ""
    weights = ", ".join(f"{size} {place}" for place, size in told.items())
    if len(told) > MOST_TOLD:
        lightest, *_, heaviest = sorted(told, key=lambda place: float(told[place].rpartition(" ")[2]))
        weights = f"from {told[lightest]} ({lightest}) to {told[heaviest]} ({heaviest})"
    return f"a {what} weighs {weights} and should weigh {right:.4g}{relation}"


def _place(case: ObjectiveCase, rank: int, micro: int) -> str:
    has_passes = any(one.micro_batch for one in case.passes)
    place = [f"in micro-batch {micro}"] if has_passes or case.world == 1 else []
    return " ".join([*place, *([f"on rank {rank}"] if case.world > 1 else [])])


def _cases(declared: str, steps: Sequence[RecordedStep]) -> Sequence[ObjectiveCase]:
    """Return the step's objective in each possible reading of its loss; raise ``_UnknownError`` if there is none."""
    if any(bool(other.local.any()) for step in steps for other in step.other_passes):
        raise _UnknownError("backward passes of several optimizers add to the same gradients")
    if any(step.weights_move_between_passes for step in steps):
        raise _UnknownError("the weights change between the backward passes of a step")
    passes = [(rank, index, one) for rank, step in enumerate(steps) for index, one in enumerate(step.passes)]
    if not passes:
        raise _UnknownError("no backward pass was recorded")
    terms = [_main_term(one) for _, _, one in passes]
    if len({(name, len(readings)) for name, readings, _ in terms}) > 1:
        raise _UnknownError("backward passes of one step have different losses")
    contributions, error = _contributions(steps, [one for *_, one in passes])
    cases = []
    for reading in range(len(terms[0][1])):
        made, tolerance = [], max(EXACT, 4 * error)
        sure = all(readings[reading].get("sure", True) for _, readings, _ in terms)
        for (rank, place, one), (_, readings, alone), share in zip(passes, terms, contributions, strict=True):
            facts = readings[reading]
            scale = share / one.scale
            tolerance = max(tolerance, ROUNDED.get(facts.get("dtype", ""), 0.0))
            rows = tuple((row[0], row[1] * scale, bool(row[2])) for row in facts["rows"] or ())
            gradient = one.local * scale if alone else None
            made.append(
                PassWeights(rank, place, facts["terms"], facts["weight"] * scale, facts["even"], rows, gradient)
            )
        if declared == SAMPLE_MEAN and not all(one.rows for one in made if one.terms):
            raise _UnknownError("it is not known which terms of the loss belong to which sample")
        if not sum(one.terms for one in made) or not all(math.isfinite(one.weight) for one in made):
            raise _UnknownError("the loss has no unmasked term, or a weight is not finite")
        alone = all(one[2] for one in terms)
        case = ObjectiveCase(declared, steps[0].number, len(steps), tuple(made), not alone, tolerance, sure)
        scaled_later = len(steps) * contributions[0] if len(set(contributions)) == 1 else 1.0
        cases.append(case if case.is_count(scaled_later) else replace(case, up_to_a_factor=True))
    return cases


def _main_term(one: BackwardPass) -> tuple[str, Sequence[Facts], bool]:
    """Return the name of the judged loss term, the possible readings of its weights, and whether it is alone."""
    noted = one.noted("objective")
    terms, calls = noted.get("terms"), noted.get("calls", ())
    alone = bool(noted.get("alone")) or (terms is not None and len(terms) == 1)
    chunks = calls_of_one_loss(noted)
    if len(chunks) > 1 and all(call.get("own") for call in chunks):
        return chunks[0]["function"], [_added_up(chunks)], True
    if len(calls) > 1:
        calls = [call for call in calls if call["function"] in CLASSES]
    if len(calls) == 1 and calls[0].get("own"):
        return calls[0]["function"], [{**calls[0]["own"], "dtype": calls[0]["dtype"]}], alone
    if terms is None:
        raise _UnknownError("the loss cannot be read from the graph: it is not a sum of means or sums")
    written = [term for term in terms if term["levels"] and all(level.get("terms") for level in term["levels"])]
    if len(calls) or len(written) != 1:
        names = " + ".join(term["name"] for term in terms)
        raise _UnknownError(f"the loss is {names}, and the weights of its tokens cannot be read from it")
    return written[0]["name"], written[0]["levels"], alone


def _added_up(chunks: Sequence[Facts]) -> Facts:
    """Return the weights of a sum of calls whose terms all weigh the same: chunks of one loss, or several losses.

    Rows may be split between chunks.
    """
    own = [call["own"] for call in chunks]
    return {
        "terms": sum(one["terms"] for one in own),
        "weight": sum(one["weight"] for one in own),
        "even": True,
        "rows": None,
        "sure": False,
        "dtype": max((call["dtype"] for call in chunks), key=lambda dtype: ROUNDED.get(dtype, 0.0)),
    }


def _contributions(steps: Sequence[RecordedStep], passes: Sequence[BackwardPass]) -> tuple[list[float], float]:
    """Return the factor of each pass's gradient in what the optimizer received, and the relative error."""
    received = received_by(steps)
    received = torch.where(received.isnan(), 0.0, received)
    if any(one.local.shape != received.shape for one in passes):
        raise _UnknownError("ranks hold different parts of the gradient")
    if not bool(received.any()) or not bool(received.isfinite().all()):
        raise _UnknownError("the gradient is zero or not finite")
    local = torch.stack([one.local.nan_to_num() / one.scale for one in passes])
    if steps[0].noted("masters").get("limit"):
        raise _UnknownError("the optimizer clips its own copies of the gradients")
    mean = local.sum(0)
    common = float(received @ mean / (mean @ mean)) if bool(mean.any()) else 0.0
    error = float((received - common * mean).norm() / received.norm())
    # A script that reduces gradients itself may give ranks different weights.
    if error > EXACT and len(passes) > 1:
        solved = torch.linalg.lstsq(local.T, received, driver="gelsd")
        other = float((received - local.T @ solved.solution).norm() / received.norm())
        if other < error / 4 and int(solved.rank) == len(passes):
            return [float(one) for one in solved.solution], _known(other)
    return [common] * len(passes), _known(error)


def _known(error: float) -> float:
    if not error <= NEAR:
        raise _UnknownError(
            "the gradient that the optimizer received is not a weighted sum of the backward passes' gradients"
        )
    return error
