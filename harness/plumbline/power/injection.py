"""Known relative errors in recorded evidence.

An error is put into the evidence, not into the trainer. A check reads each step by itself, from the weights that the
rank recorded before it, and asks whether the step's gradient, update or reported loss is right. So evidence in which
one of them is off by a known part is, for that check, what a trainer with this error would have recorded, and the error
has exactly the size that is asked for: in a trainer it would pass through a reduction, a scaler and a cast, each of
which rounds it to another size. The other checks of the same trace are not asked, for a trainer would have gone on from
its error: what is measured is each check alone, and the judge, which has all of them, notices at least as much.

Every rank has the same error. One on a single rank alone is seen at any size, because ranks are compared bit for bit.
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
"""A tensor this much shorter than the longest is zero but for rounding: a bias in front of a BatchNorm, say."""


@dataclass(frozen=True)
class Place:
    """Where an error is put.

    Args:
        step: the index of an optimizer step.
        parameter: the tensor that is wrong, in a direction drawn by ``seed``; None: all of them, times a number.
        seed: of the direction.
    """

    step: int
    parameter: str | None
    seed: int = 0


Inject = Callable[[Trace, Place, float], Trace]
"""Returns the trace with a relative error of that size at a place."""


def gradient_off(trace: Trace, place: Place, size: float) -> Trace:
    """Return the trace with a gradient that is wrong by ``size`` times its length, on every rank."""

    def changed(step: Step) -> Step:
        return replace(step, gradients=_off(step.gradients, step.gradients, place, size))

    return _at(trace, place.step, changed)


def update_off(trace: Trace, place: Place, size: float) -> Trace:
    """Return the trace with an update, weights after less before, that is wrong by ``size`` times its length."""

    def changed(step: Step) -> Step:
        updates = {name: value.double() - step.before[name].double() for name, value in step.after.items()}
        return replace(step, after=_off(step.after, updates, place, size))

    return _at(trace, place.step, changed)


def places(trace: Trace, count: int, seed: int, *, whole: bool) -> list[Place]:
    """Return ``count`` places of a trace at random: ``whole`` gradients, or one tensor each."""
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
    """Return tensors to which ``size`` times their parts was added, or a vector of that length; in their own dtype."""
    if place.parameter is None:
        return {name: _added(value, size * parts[name].double()) for name, value in tensors.items()}
    value, part = tensors[place.parameter], parts[place.parameter]
    generator = torch.Generator().manual_seed(place.seed)
    direction = torch.randn(value.shape, dtype=torch.float64, generator=generator)
    error = direction * (size * norm(part) / norm(direction))
    return {**tensors, place.parameter: _added(value, error)}


def _added(value: Tensor, error: Tensor) -> Tensor:
    return (value.double() + error).to(value.dtype)
