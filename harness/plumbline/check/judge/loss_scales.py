"""Loss scales of trainers that have a scaler of their own: DeepSpeed's, Apex's and Megatron's step master weights."""

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
"""A power of two from which the weight of losses is taken for a loss scale. Chosen: smaller ones may be numbers of
micro-batches or ranks."""


def with_own_loss_scales(training: RecordedTraining) -> RecordedTraining:
    """Return a training whose backward passes have the scale by which a trainer's own scaler multiplied their losses.

    Losses that count 4096-fold in all have a scale of 4096 if master weights receive a 4096th of their gradient. They
    receive another part of it if they are wrong or clipped. A large power of two is taken for a scale even then.
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
    """Master weights receive their gradients divided by the same number at every step, which clipping does not do.

    ``weight`` is what the losses of a step count in all; None where a pass has no loss function of torch, or several.
    """

    divisor: float
    weight: float | None


def division(training: RecordedTraining) -> Division | None:
    """Return by what the gradients of all master weights are divided, None without one number above 1.

    Where gradients are equally long at all steps, they may have been clipped.
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
    """Return which multiple of the right gradients optimizers received; NaN if it is none."""
    factor = factor_in(steps[0])
    return multiple_of(steps) if factor is None else factor


def _own_objective(steps: Sequence[RecordedStep]) -> StepObjective | None:
    """Return the objective of a step of master weights, None where it is not known or torch's scaler is in it."""
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
    """Return the power of two that a scale is, known from gradients that were rounded, or the number as it is."""
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
