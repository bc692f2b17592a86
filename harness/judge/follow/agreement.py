"""Gradients that agree with the weights after the step, too.

A gradient that was found for its sketch is uncertain by rounding, and an optimizer may make much of little: Adam
divides by it. So where the weights after a step are not those of the gradient that was found, it is looked for among
the others that leave the same sketch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.core.sketch import Sketch
from harness.core.trace import Step, Tensors
from harness.judge.follow.known import Known
from harness.judge.follow.projection import correction, projection_of
from harness.judge.follow.replay import Replay
from harness.judge.follow.scenes import rounding_sizes
from harness.judge.follow.search import residual_of
from harness.judge.noise import norm

CLOSE = 3.0
"""Weights that are so many roundings away are those that the gradient leads to."""

SURPRISING = 5.0
"""A gradient so many times as far away as its uncertainty says is not looked for: the optimizer did something else."""

ROUNDS = 4
"""How often a gradient is moved: the first time by far the most, as what optimizers do is nearly linear in little."""


def agreed(step: Step, gradients: Mapping[str, Any], after: Mapping[str, Any], replay: Replay, known: Known) -> Tensors:
    """Return the step's gradients, moved within their uncertainty so that they lead to the weights after it.

    Where no likely gradient does, the optimizer has done something else with it, and it is left as it is.

    Args:
        step: with the gradients that were found.
        gradients: as they were recorded.
        after: the weights after the step, as they were recorded.
        replay: the optimizer as it was before the step.
        known: what was found so far; gradients that are moved are taken up there.
    """
    found = dict(step.gradients)
    spreads: Tensors = {}
    for name, value in gradients.items():
        if isinstance(value, Sketch):
            found[name] = known.tensor(value)
            spread = known.release(value)
            if spread is not None and isinstance(after.get(name), Sketch):
                spreads[name] = spread
    for _ in range(ROUNDS):
        made = replay.attempt(step.before, found, step.learning_rates)
        wrong = [name for name in spreads if _is_wrong(after[name], step.before[name], made[name])]
        if not wrong:
            break
        aside = {name: value.double() + spreads.get(name, 0.0) for name, value in found.items()}
        pushed = replay.attempt(step.before, aside, step.learning_rates)
        for name in wrong:
            spread = spreads[name]
            slope = torch.where(spread > 0, (pushed[name] - made[name]) / spread, 0.0)
            errors = rounding_sizes(step.before[name], made[name])
            residual = residual_of(after[name], made[name])
            projection = projection_of(after[name].shape, after[name].numbers)
            change, surprise = correction(residual, projection, slope, spread, errors)
            if surprise <= SURPRISING:
                found[name] = known.replace(gradients[name], found[name].double() + change)
            else:
                del spreads[name]
    return found


def _is_wrong(recorded: Sketch, before: Tensor, made: Tensor) -> bool:
    error = norm(residual_of(recorded, made))
    return error > CLOSE * norm(rounding_sizes(before, made))
