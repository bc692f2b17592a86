"""Checks the gradient against the objective that the user declared, over all ranks and micro-batches of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from plumbline.check.evidence.options import SAMPLE_MEAN, SUM, TOKEN_MEAN
from plumbline.check.evidence.training import BackwardPass, Facts, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import amount, not_judged
from plumbline.check.judge.objective_case import ObjectiveCase, PassWeights
from plumbline.check.judge.rank_layout import rank_layout
from plumbline.check.judge.step_objective import EXACT, NEAR, calls_of_one_loss, received_by, steps_together
from plumbline.check.rank.observers.loss_functions import CLASSES
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import passed
from plumbline.judge.hypothesis import explain
from plumbline.report.text import in_two_digits

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
    noted = one.facts.get("objective", {})
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
    if steps[0].facts.get("masters", {}).get("limit"):
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
