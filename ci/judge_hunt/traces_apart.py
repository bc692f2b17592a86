"""Measures the difference between two trainings of one problem, from their ranks' records."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isnan

import torch

from plumbline.evidence.trace import Step, Tensors, Trace
from plumbline.judge.oracle.noise import length


def apart(left: Trace | None, right: Trace | None) -> float:
    """Return the largest distance between weights, gradients, updates or buffers of one step and rank.

    It is relative to the norm of all of them together, because a tensor may be zero except for rounding. It is 0 if all
    bits are equal, and infinite if samples, steps, rates or evaluations differ.
    """
    if left is None or right is None or _shape(left) != _shape(right):
        return inf
    return max((_distance(*pair) for pair in _pairs(left, right)), default=0.0)


def _shape(trace: Trace) -> list[object]:
    return [
        (
            [_of_step(step) for step in rank.steps],
            [(one.step, one.micro_batches, sorted(one.samples), one.training) for one in rank.evaluations],
            rank.error,
        )
        for rank in trace.ranks
    ]


def _of_step(step: Step) -> object:
    samples = [[sorted(micro.samples), sorted(micro.loss or ())] for micro in step.micro_batches]
    return samples, step.learning_rates, step.skipped, sorted(step.gradients), sorted(step.after)


def _pairs(left: Trace, right: Trace) -> Iterator[tuple[Tensors, Tensors]]:
    for one, other in zip(left.ranks, right.ranks, strict=True):
        for mine, yours in zip(one.steps, other.steps, strict=True):
            # Both skipped the step, or neither did: overflows are not compared.
            for pick in ("before", "after", "buffers", *(() if mine.skipped else ("gradients",))):
                yield getattr(mine, pick), getattr(yours, pick)
            yield _update(mine), _update(yours)
        yield one.final or {}, other.final or {}


def _update(step: Step) -> Tensors:
    return {name: value.double() - step.before[name].double() for name, value in step.after.items()}


def _distance(left: Tensors, right: Tensors) -> float:
    if left.keys() != right.keys():
        return inf
    if all(torch.equal(value, right[name]) for name, value in left.items()):
        return 0.0
    apart = length({name: value.double() - right[name].double() for name, value in left.items()})
    size = max(length(left), length(right))
    distance = apart / size if size else inf
    return inf if isnan(distance) else distance
