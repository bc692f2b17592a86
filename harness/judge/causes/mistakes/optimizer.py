"""What the optimizer was handed, if anything."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, scaled
from harness.judge.oracle.noise import norm
from harness.judge.oracle.oracle import clipped


def _zero(scene: Scene) -> Iterable[Tensors]:
    if scene.step.gradients and all(norm(value) == 0 for value in scene.step.gradients.values()):
        yield {name: torch.zeros_like(value) for name, value in scene.truth.contract.items()}


def _absent(scene: Scene) -> Iterable[Tensors]:
    right, given = scene.truth.contract, scene.step.gradients
    if any(name not in given for name in right):
        yield {name: value for name, value in right.items() if name in given}


def _some_zero(scene: Scene) -> Iterable[Tensors]:
    right = scene.truth.contract
    zero = {name for name, value in scene.given.items() if norm(value) == 0 and norm(right[name])}
    if zero:
        yield {name: torch.zeros_like(value) if name in zero else value for name, value in right.items()}


def _flipped(scene: Scene) -> Iterable[Tensors]:
    yield clipped(scaled(-1.0, scene.truth.raw), scene.clip_norm)


EXPLANATIONS = (
    Explanation(
        "parameter-not-in-optimizer", "optimizer",
        "right, but the optimizer was not handed all of them",
        "parameters are missing from its groups, or had no gradient when it stepped", _absent,
    ),
    Explanation(
        "zero", "optimizer",
        "all zero", "they were zeroed, or the loss detached, before the optimizer stepped", _zero,
    ),
    Explanation(
        "some-zero", "optimizer",
        "right for some parameters and zero for others",
        "something between them is detached, frozen or zeroed", _some_zero,
    ),
    Explanation(
        "sign-flipped", "optimizer",
        "the right ones with the other sign", "is the loss negated, or the optimizer told to maximise?", _flipped,
    ),
)  # fmt: skip
