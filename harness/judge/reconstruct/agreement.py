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

from harness.evidence.trace import Sketch, Step, Tensors
from harness.judge.oracle.noise import norm
from harness.judge.reconstruct.inverse_projection import correction, projection_of
from harness.judge.reconstruct.known_tensors import KnownTensors
from harness.judge.reconstruct.optimizer_replay import Replay
from harness.judge.reconstruct.search import residual_of
from harness.judge.reconstruct.step_context import rounding_sizes

CLOSE = 3.0
"""Weights that are so many roundings away are those that the gradient leads to."""

SURPRISING = 25.0
"""A gradient so many times as far away as its uncertainty says is not looked for: the optimizer did something else."""

ROUNDS = 4
"""How often a gradient is moved: the first time by far the most."""

REACH = 4.0
"""An entry is looked for so many times as far away as it is uncertain."""

HALVINGS = 40
"""As many as a float32 number can be told by, and some."""


def agreed(
    step: Step,
    gradients: Mapping[str, Any],
    after: Mapping[str, Any],
    rounding: Tensors,
    replay: Replay,
    known: KnownTensors,
) -> Tensors:
    """Return the step's gradients, moved within their uncertainty so that they lead to the weights after it.

    Where no likely gradient does, the optimizer has done something else with it, and it is left as it is.

    Args:
        step: with the gradients that were found.
        gradients: as they were recorded.
        after: the weights after the step, as they were recorded.
        rounding: how large one rounding of each entry of the gradients is.
        replay: the optimizer as it was before the step.
        known: what was found so far; gradients that are moved are taken up there.
    """
    found = dict(step.gradients)
    spreads: Tensors = {}
    for name, value in gradients.items():
        if isinstance(value, Sketch):
            found[name] = known.tensor(value)
            spread = known.release(value, rounding.get(name))
            if spread is not None and isinstance(after.get(name), Sketch):
                spreads[name] = spread
    for number in range(ROUNDS):
        made = replay.attempt(step.before, found, step.learning_rates)
        wrong = [name for name in spreads if _is_wrong(after[name], step.before[name], made[name])]
        if not wrong:
            break
        low, high = (
            {**found, **{name: found[name].double() + way * spreads[name] for name in wrong}} for way in (-1.0, 1.0)
        )
        below, above = (replay.attempt(step.before, pushed, step.learning_rates) for pushed in (low, high))
        targets: Tensors = {}
        for name in wrong:
            spread = spreads[name]
            slope = torch.where(spread > 0, (above[name] - below[name]) / (2 * spread), 0.0)
            errors = rounding_sizes(step.before[name], made[name])
            residual = residual_of(after[name], made[name])
            projection = projection_of(after[name].shape, after[name].numbers)
            change, surprise = correction(residual, projection, slope, spread, errors)
            # Once it was likely it stays so: what is left is what bends.
            if number or surprise <= SURPRISING:
                targets[name] = made[name] + slope * change
            else:
                del spreads[name]
        for name, gradient in _leading_to(targets, found, spreads, step, replay).items():
            found[name] = known.replace(gradients[name], gradient)
    return found


def _leading_to(targets: Tensors, found: Tensors, spreads: Tensors, step: Step, replay: Replay) -> Tensors:
    """Return the gradients near to those that were found that make, entry by entry, the weights ``targets``.

    By bisection: of an entry that is zero within rounding only the sign may count, and no slope tells where it turns.
    """
    low, high = ({name: found[name].double() + way * REACH * spreads[name] for name in targets} for way in (-1.0, 1.0))
    ends = [replay.attempt(step.before, {**found, **end}, step.learning_rates) for end in (low, high)]
    rising = {name: ends[1][name] >= ends[0][name] for name in targets}
    for _ in range(HALVINGS if targets else 0):
        middle = {name: (low[name] + high[name]) / 2 for name in targets}
        made = replay.attempt(step.before, {**found, **middle}, step.learning_rates)
        for name, target in targets.items():
            up = (made[name] < target) == rising[name]
            low[name], high[name] = torch.where(up, middle[name], low[name]), torch.where(up, high[name], middle[name])
    return {name: torch.where(spreads[name] > 0, (low[name] + high[name]) / 2, found[name]) for name in targets}


def _is_wrong(recorded: Sketch, before: Tensor, made: Tensor) -> bool:
    error = norm(residual_of(recorded, made))
    return error > CLOSE * norm(rounding_sizes(before, made))
