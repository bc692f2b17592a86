"""How far two trainings of one problem are apart, by what their ranks recorded."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from harness.evidence.trace import Step, Trace


def apart(left: Trace | None, right: Trace | None) -> float:
    """Return the largest distance between two tensors of the same name, step and rank, relative to their length.

    It is 0 where all bits are the same, and infinite where samples, steps, rates or evaluations differ.
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


def _pairs(left: Trace, right: Trace) -> Iterator[tuple[Tensor, Tensor]]:
    for one, other in zip(left.ranks, right.ranks, strict=True):
        for mine, yours in zip(one.steps, other.steps, strict=True):
            for pick in ("before", "gradients", "after", "buffers"):
                theirs = getattr(yours, pick)
                for name, value in getattr(mine, pick).items():
                    yield value, theirs[name]
        for name, value in (one.final or {}).items():
            yield value, (other.final or {})[name]


def _distance(left: Tensor, right: Tensor) -> float:
    if torch.equal(left, right):
        return 0.0
    size = max(float(left.double().norm()), float(right.double().norm()))
    distance = float((left.double() - right.double()).norm()) / size
    return distance if distance == distance else inf
