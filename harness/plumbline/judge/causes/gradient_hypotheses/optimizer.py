"""Gradients that are absent, zero or negated when the optimizer steps."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import clipped


def _zero(case: GradientCase) -> Gradients:
    if case.step.gradients and all(norm(value) == 0 for value in case.step.gradients.values()):
        yield {name: torch.zeros_like(value) for name, value in case.expected.contract.items()}


def _absent(case: GradientCase) -> Gradients:
    right, observed = case.expected.contract, case.step.gradients
    if any(name not in observed for name in right):
        yield {name: value for name, value in right.items() if name in observed}
        yield clipped({name: value for name, value in case.expected.raw.items() if name in observed}, case.clip_norm)


def _some_zero(case: GradientCase) -> Gradients:
    right = case.expected.contract
    zero = {name: 0 * value for name, value in right.items() if norm(value) and norm(case.observed[name]) == 0}
    if zero:
        yield {**right, **zero}
        # They count in the norm where they are zeroed after clipping only.
        yield clipped({**case.expected.raw, **zero}, case.clip_norm)


def _flipped(case: GradientCase) -> Gradients:
    yield clipped(scaled(-1.0, case.expected.raw), case.clip_norm)


HYPOTHESES = (
    GradientHypothesis("parameter-not-in-optimizer", "optimizer", _absent,
        "right, but some parameters had none when the optimizer stepped",
        "are all parameters in the optimizer's groups, and do all of them have a gradient at the step?", 940),
    GradientHypothesis("zero", "optimizer", _zero,
        "all zero",
        "they were zeroed, or the loss detached, before the optimizer stepped", 935),
    GradientHypothesis("some-zero", "optimizer", _some_zero,
        "right for some parameters and zero for others",
        "is something between these parameters and the loss detached, frozen or zeroed?", 930),
    GradientHypothesis("sign-flipped", "optimizer", _flipped,
        "the right ones with the opposite sign",
        "is the loss negated, or the optimizer created with maximize=True?", 925),
)  # fmt: skip
