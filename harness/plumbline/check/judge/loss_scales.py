"""Loss scales of trainers with their own scaler and master weights: DeepSpeed, Apex and Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.joint_scales import factor_in, without_loss_scale
from plumbline.check.judge.model_parts import OBSERVER as JOINT
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
