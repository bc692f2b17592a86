"""Puts known relative errors into recorded evidence.

A check reads each step by itself, from the weights recorded before it. So evidence with a wrong gradient is, for
that check, what a trainer with this error would have recorded, and the error has exactly the size that was asked
for: a trainer's reduction, scaler and cast would round it. Only this check is asked, because a trainer would have
continued from its error.

Every rank gets the same error. An error of a single rank shows at any size, because ranks are compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plumbline.evidence.trace import Step, Tensors, Trace
from plumbline.judge.oracle.noise import norm

NEGLIGIBLE = 1e-9
"""A tensor whose norm is this part of the largest is zero except for rounding, such as a bias before a BatchNorm."""


@dataclass(frozen=True)
class Place:
    """Where an error is put: the index of an optimizer step, and one tensor in a random direction, or all scaled."""

    step: int
    parameter: str | None
    seed: int = 0


def gradient_off(trace: Trace, place: Place, size: float) -> Trace:
    """Return the trace with a gradient that is wrong by ``size`` times its norm."""

    def changed(step: Step) -> Step:
        return replace(step, gradients=_off(step.gradients, step.gradients, place, size))

    return _at(trace, place.step, changed)


def update_off(trace: Trace, place: Place, size: float) -> Trace:
    """Return the trace with an update, weights after minus before, that is wrong by ``size`` times its norm."""

    def changed(step: Step) -> Step:
        updates = {name: value.double() - step.before[name].double() for name, value in step.after.items()}
        return replace(step, after=_off(step.after, updates, place, size))

    return _at(trace, place.step, changed)


def places(trace: Trace, count: int, seed: int, *, whole: bool) -> list[Place]:
    """Return random places in a trace: ``whole`` gradients, or one tensor each."""
    draw = random.Random(seed)
    steps = [index for index, step in enumerate(trace.ranks[0].steps) if not step.skipped and step.gradients]
    return [
        Place(
            step, None if whole else draw.choice(_lasting(trace.ranks[0].steps[step].gradients)), draw.randrange(2**31)
        )
        for step in (draw.choice(steps) for _ in range(count if steps else 0))
    ]


def _lasting(gradients: Tensors) -> list[str]:
    lengths = {name: norm(value) for name, value in gradients.items()}
    return [name for name, value in lengths.items() if value >= NEGLIGIBLE * max(lengths.values())]


def _at(trace: Trace, index: int, changed: Callable[[Step], Step]) -> Trace:
    ranks = (
        replace(rank, steps=tuple(changed(step) if number == index else step for number, step in enumerate(rank.steps)))
        for rank in trace.ranks
    )
    return replace(trace, ranks=tuple(ranks))


def _off(tensors: Tensors, parts: Tensors, place: Place, size: float) -> Tensors:
    if place.parameter is None:
        return {name: _added(value, size * parts[name].double()) for name, value in tensors.items()}
    value, part = tensors[place.parameter], parts[place.parameter]
    generator = torch.Generator().manual_seed(place.seed)
    direction = torch.randn(value.shape, dtype=torch.float64, generator=generator)
    error = direction * (size * norm(part) / norm(direction))
    return {**tensors, place.parameter: _added(value, error)}


def _added(value: Tensor, error: Tensor) -> Tensor:
    return (value.double() + error).to(value.dtype)
