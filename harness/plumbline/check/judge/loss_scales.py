"""Common factors of gradients: of clipping, and the loss scales of trainers with their own scaler and master weights.

Such trainers are DeepSpeed, Apex and Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plumbline.check.evidence.training import Facts, RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import OBSERVER as MASTERS
from plumbline.check.judge.clipped_masters import SAME_LENGTH, are_clipped, are_one
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
        """Whether the norm of the gradients is the trainer's limit."""
        return self.limit is not None and any(are_one([norm, self.limit]) for norm in self.norms)


def factor_in(step: RecordedStep) -> float | None:
    """Return the common factor of a step's gradients that the joint forward shows, None if it shows none."""
    scaled = (step.facts.get(JOINT) or {}).get("scaled")
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
            limit = (step.facts.get(MASTERS) or {}).get("limit")
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
