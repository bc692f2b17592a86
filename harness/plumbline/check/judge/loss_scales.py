"""Common factors of gradients, of clipping and of loss scales, and checks of the steps that a scaler skips.

Trainers with their own scaler and master weights are DeepSpeed, Apex and Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plumbline.check.evidence.training import Facts, RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import OBSERVER as MASTERS
from plumbline.check.judge.clipped_masters import SAME_LENGTH, are_clipped, are_one
from plumbline.check.judge.noted import ObserverFacts, failed_observers, noted, side_by_side
from plumbline.check.judge.rank_weights import JOINT
from plumbline.check.judge.step_objective import (
    EXACT,
    NEAR,
    StepObjective,
    equals,
    multiple_of,
    objective_of_losses,
    spread,
    steps_together,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.evidence.training_record import SkippedStep, step_copies
from plumbline.judge.checks.skipped_steps import (
    CHECK,
    moved_when_skipped,
    passed_with,
    skipped_for_nothing,
    skipped_on_some_ranks,
    skipped_without_overflow,
)


@dataclass(frozen=True)
class ScaledStep:
    """A step whose gradients are right up to one factor, which is known up to a relative error of ``within``.

    ``norms`` are the smallest and the largest possible norm of the gradients of ``parameters`` parameters. ``limit`` is
    the clipping limit of the trainer that steps the optimizer, None if the trainer does not state one.
    """

    factor: float
    norms: Sequence[float]
    limit: float | None
    parameters: int
    within: float

    @property
    def is_at_the_limit(self) -> bool:
        return self.limit is not None and any(are_one([norm, self.limit]) for norm in self.norms)


def factor_in(step: RecordedStep) -> float | None:
    """Return the common factor of a step's gradients that the joint forward shows, None if it shows none."""
    scaled = step.noted(JOINT).get("scaled")
    return None if scaled is None else float(scaled["factor"])


def without_loss_scale(found: Facts, scale: float) -> Facts:
    """Return the joint forward's facts of a step, corrected for a loss scale by which gradients were divided."""
    scaled = found["scaled"]
    factor = scaled["factor"] * scale
    others = {key: value for key, value in found.items() if key != "scaled"}
    if abs(factor - 1) <= scaled["within"]:
        return others
    wrong = dict(scaled["wrong"])
    wrong |= {key: wrong[key] * scale for key in ("received", "left", "left_in_parts") if key in wrong}
    wrong["again"] = [[received * scale, right, noise] for received, right, noise in wrong["again"]]
    return {**others, "scaled": {**scaled, "factor": factor, "wrong": wrong}}


def scaled_by_mistake(steps: Sequence[RecordedStep]) -> Mapping[int, Facts]:
    """Return, by step number, what is wrong in steps whose common factor does not come from clipping.

    Clipped gradients have the trainer's limit as norm, however often they counted before, or are shorter than right
    ones and have the same norm at several steps. At the first step, the parameters of some optimizers may be unknown,
    so the norm of the others may be smaller.
    """
    scaled = _scaled_steps(steps)
    most = max((one.parameters for one in scaled.values()), default=0)
    shorter = [one for one in scaled.values() if one.factor < 1 - SAME_LENGTH and one.parameters == most]
    factors, within = [one.factor for one in shorter], 2 * max((one.within for one in shorter), default=0.0)
    is_one_norm = any(are_clipped([one.norms[place] for one in shorter], factors, within) for place in (0, 1))
    length = max((one.norms[1] for one in shorter), default=0.0) * (1 + SAME_LENGTH)
    counted = {number for number, one in scaled.items() if one.parameters == most or number == min(scaled)}
    shortened = {number for number in counted if scaled[number].factor < 1 and scaled[number].norms[0] <= length}
    clipped = {number for number, one in scaled.items() if one.is_at_the_limit or (is_one_norm and number in shortened)}
    return {
        step.number: step.facts[JOINT]["scaled"]["wrong"]
        for step in steps
        if factor_in(step) is not None and step.number not in clipped
    }


def _scaled_steps(steps: Sequence[RecordedStep]) -> Mapping[int, ScaledStep]:
    """Return the steps by number. Of several steps with one number, the last one has the norms of all parts."""
    found = {}
    for step in steps:
        if (factor := factor_in(step)) is not None:
            limit = step.noted(MASTERS).get("limit")
            joint = step.facts[JOINT]
            found[step.number] = ScaledStep(
                factor, joint["norms"], limit, joint["parameters"], joint["scaled"]["within"]
            )
    return found


def are_clipped_apart(found: Facts, lengths: Sequence[float]) -> bool:
    """Return whether groups of ranks scaled the gradients of their parts to one norm, each by its own factor.

    ``lengths`` are the norms of what each rank's optimizers received. Copies of whole parameters are left out, because
    ``found`` does not say what each of them should receive.
    """
    limit = found["limit"]
    if any(abs(one["received"]) > 2 * limit * one["noise"] for one in found["right"]):
        return False
    factors: dict[int, tuple[float, float]] = {}
    for one in found["wrong"]:
        directions = [(one["received"], one["right"], one["noise"]), *map(tuple, one["again"])]
        received, right, noise = max(directions, key=lambda each: abs(each[1]) / each[2])
        within = limit * noise / abs(right) if right else math.inf
        if one["began_alike"] or within > SAME_LENGTH:
            continue
        for rank in one["ranks"]:
            known, least = factors.get(rank, (received / right, within))
            if abs(received / right - known) > within + least:
                return False
            factors[rank] = known, max(within, least)
    groups: list[list[int]] = []
    for rank, (factor, within) in factors.items():
        alike = [one for one in groups if abs(factors[one[0]][0] - factor) <= within + factors[one[0]][1]]
        if not alike:
            groups.append([])
        (alike or groups)[-1].append(rank)
    return (
        len(factors) == len(lengths)
        and len(groups) > 1
        and all(0 < factor < 1 for factor, _ in factors.values())
        and are_one([math.hypot(*(lengths[rank] for rank in one)) for one in groups])
    )


def are_clipped_by_hand(factors: Sequence[float | None], lengths: Sequence[float]) -> bool:
    """Return whether ranks shortened the gradients that each of them holds to one norm, by different factors.

    ``factors`` are those by which each rank's script multiplied all of them, None if unknown. ``lengths`` are their
    norms afterwards.
    """
    known = [one for one in factors if one is not None]
    shortened = [length for factor, length in zip(known, lengths, strict=False) if factor < 1 - SAME_LENGTH]
    return (
        len(known) == len(lengths)
        and spread(known) > 1 + SAME_LENGTH >= max(known)
        and are_one(shortened)
        and max(lengths) <= shortened[0] * (1 + SAME_LENGTH)
    )


LEAST = 256
"""Smallest power of two at which the weight of losses counts as a loss scale. Chosen: smaller ones may be numbers of
micro-batches or ranks."""


def with_own_loss_scales(training: RecordedTraining) -> RecordedTraining:
    """Return a training whose backward passes have the loss scale of the trainer's own scaler.

    Losses with a total weight of 4096 have a scale of 4096 if master weights receive 1/4096 of their gradient. If
    gradients are wrong or clipped, the fraction differs. A large power of two counts as a scale even then.
    """
    scales: dict[tuple[int, int], float] = {}
    for steps in steps_together(training.ranks):
        objective = _own_objective(steps)
        if objective is not None and _is_scaled(objective, _multiple(steps)):
            scales[steps[0].optimizer, steps[0].number] = objective.of_losses
    if not scales:
        return training
    ranks = (replace(one, steps=tuple(_scaled(one.steps, scales))) for one in training.ranks)
    return replace(training, ranks=tuple(ranks))


@dataclass(frozen=True)
class Division:
    """A division of all master weights' gradients by the same number at every step, which clipping does not do.

    ``weight`` is the total weight of a step's losses; None if a pass has no torch loss function, or several.
    """

    divisor: float
    weight: float | None


def division(training: RecordedTraining) -> Division | None:
    """Return the division of the gradients of all master weights, None without a single divisor above 1.

    None also if gradients have the same norm at all steps, because they may have been clipped.
    """
    together = [steps for steps in steps_together(training.ranks) if steps[0].is_in_pieces]
    multiples = [_multiple(steps) for steps in together]
    if len(multiples) < 2 or not all(0 < one < 1 / (1 + NEAR) for one in multiples):
        return None
    lengths = [math.hypot(*(step.norm for step in steps)) for steps in together]
    if spread(multiples) > 1 + EXACT or spread(lengths) <= 1 + NEAR:
        return None
    weights = {objective.of_losses if (objective := _own_objective(steps)) else None for steps in together}
    return Division(_near_power_of_two(1 / multiples[0]), weights.pop() if len(weights) == 1 else None)


def _multiple(steps: Sequence[RecordedStep]) -> float:
    """Return which multiple of the right gradients optimizers received; NaN if it is not a multiple."""
    factor = factor_in(steps[0])
    return multiple_of(steps) if factor is None else factor


def _own_objective(steps: Sequence[RecordedStep]) -> StepObjective | None:
    """Return the objective of a step of master weights, None if it is unknown or torch's scaler scaled the loss."""
    if not all(step.is_in_pieces and all(one.scale == 1 for one in step.passes) for step in steps):
        return None
    return objective_of_losses(steps)


def _is_scaled(objective: StepObjective, multiple: float) -> bool:
    weight = objective.of_losses
    if weight <= 1 + NEAR or abs(multiple - 1) <= NEAR:
        return False
    are_means = all(share.reduction == "mean" for share in objective.shares)
    is_large_power = are_means and weight >= LEAST * (1 - NEAR) and equals(weight, _power_of_two(weight))
    return is_large_power or abs(weight * multiple - 1) <= NEAR


def _near_power_of_two(number: float) -> float:
    """Return the nearest power of two if a scale, known from rounded gradients, equals it; otherwise the number."""
    return power if equals(number, power := _power_of_two(number)) else number


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))


def _scaled(steps: Sequence[RecordedStep], scales: dict[tuple[int, int], float]) -> Iterator[RecordedStep]:
    for step in steps:
        scale = scales.get((step.optimizer, step.number), 1.0)
        facts = step.facts
        if scale != 1 and factor_in(step) is not None:
            facts = {**facts, JOINT: without_loss_scale(facts[JOINT], scale)}
        yield replace(step, passes=tuple(replace(one, scale=one.scale * scale) for one in step.passes), facts=facts)


OBSERVER = "loss-scale"


def judge_skipped_steps(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong with skipped steps and infinities, or how many were skipped; nothing without a scaler."""
    flaws = [_on_some_ranks, _moved, _for_nothing, _without_overflow, _not_finite]
    found = [finding for flaw in flaws if (finding := next(flaw(training), None)) is not None]
    yield from found
    yield from failed_observers(training, OBSERVER, CHECK)
    scaled = [one for one in noted(training, OBSERVER) if one.facts["scaled"]]
    if scaled and not found:
        yield passed_with(sum(one.step.skipped for one in scaled), len(scaled), ranks=training.world_size)


def _skipped(one: ObserverFacts) -> SkippedStep:
    moved = one.facts.get("moved") or {"weights": 0, "state": 0}
    what = "the optimizer's state" if moved["state"] else ""
    if moved["weights"]:
        what = f"{moved['weights']} of {counted(len(one.parameters), 'parameter')}"
    return SkippedStep(one.rank, one.number, what, one.facts.get("found", 0) + one.facts["bad"] > 0)


def _on_some_ranks(training: RecordedTraining) -> Iterator[Finding]:
    for ranks in side_by_side(training, OBSERVER):
        if step_copies(ranks.values()) and (flaw := skipped_on_some_ranks(ranks, CHECK)) is not None:
            yield flaw


def _moved(training: RecordedTraining) -> Iterator[Finding]:
    found = (moved_when_skipped(_skipped(one)) for one in noted(training, OBSERVER) if one.skipped)
    return (finding for finding in found if finding is not None)


def _for_nothing(training: RecordedTraining) -> Iterator[Finding]:
    """Find skipped steps whose gradients were finite on every rank. A scaler may take other ranks into account."""
    found = (skipped_for_nothing([*map(_skipped, ranks.values())]) for ranks in _skipped_by_all(training))
    return (finding for finding in found if finding is not None)


def _without_overflow(training: RecordedTraining) -> Iterator[Finding]:
    if len({one.optimizer for one in noted(training, OBSERVER)}) > 1:
        return  # if all gradients are clipped together, an infinity of one optimizer spreads to the others
    for ranks in _skipped_by_all(training):
        if not step_copies(ranks.values()) or not _far_from_overflow([one.step for one in ranks.values()]):
            continue
        for one in ranks.values():
            if (name := _infinite_where_passes_are_not(one.step)) is not None:
                evidence = "the backward passes computed finite ones on every rank"
                yield skipped_without_overflow(one.number, one.rank, name, evidence)


def _skipped_by_all(training: RecordedTraining) -> Iterator[Mapping[int, ObserverFacts]]:
    for ranks in side_by_side(training, OBSERVER):
        if len(ranks) == training.world_size and all(one.skipped for one in ranks.values()):
            yield ranks


def _far_from_overflow(steps: Sequence[RecordedStep]) -> bool:
    """Return whether gradients that arrived on all ranks are finite, and remain finite in any sum.

    A script may sum them over ranks in float16, whatever precision it trains in.
    """
    parameters = [parameter for step in steps for parameter in step.parameters]
    if not all(parameter.sampled for parameter in parameters):
        return False
    half = len(steps) > 1 or any(parameter.dtype == "float16" for parameter in parameters)
    most = torch.finfo(torch.float16 if half else torch.float32).max
    arrived = [step.norms(one.local) for step in steps for one in (*step.passes, *step.other_passes)]
    # Norms of projections are known to a fifth.
    return bool(arrived) and bool((2 * torch.stack(arrived).sum(0) <= most).all())


def _infinite_where_passes_are_not(step: RecordedStep) -> str | None:
    if not step.passes:
        return None
    arrived = torch.stack([step.norms(one.local) for one in step.passes]).any(0)
    bad = ~step.norms(step.before_clipping).isfinite() & arrived
    return next((one.name for one, is_bad in zip(step.parameters, bad, strict=True) if is_bad), None)


def _not_finite(training: RecordedTraining) -> Iterator[Finding]:
    for one in noted(training, OBSERVER):
        broken = one.facts.get("broken", 0)
        if not one.step.skipped and broken:
            hint = (
                f"rank {skipping} found an infinity and skipped its step, but the other ranks took theirs; let all "
                "ranks skip together: all-reduce the result of this check"
                if (skipping := _rank_that_skipped(training, one)) is not None
                else "call scaler.step(optimizer), not optimizer.step()"
                if any(each.scale != 1.0 for each in one.step.passes)
                else "use torch.autograd.detect_anomaly to find the first operation that is not finite"
            )
            observed = (
                f"the step made {counted(broken, 'parameter')} infinite or NaN (gradients that were not finite: "
                f"{one.facts['bad']})"
            )
            yield one.failed(CHECK, observed, hint, cause="not-finite", family="amp")


def _rank_that_skipped(training: RecordedTraining, one: ObserverFacts) -> int | None:
    """Return a rank that computed infinities in a pass that other ranks did not run before a step, None without one.

    It skipped an own step after this pass. The other ranks took theirs with what they received of the infinities.
    """
    ranks = [(rank.rank, step) for rank in training.ranks for step in rank.steps]
    same = [(rank, step) for rank, step in ranks if (step.number, step.optimizer) == (one.number, one.optimizer)]
    fewest = min(len(step.passes) for _, step in same)
    skipped = (
        rank
        for rank, step in same
        if any(not bool(each.local.isfinite().all()) for each in step.passes[: len(step.passes) - fewest])
    )
    return next(skipped, None)
