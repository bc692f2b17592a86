"""Gradients that are zero or negated when the optimizer steps."""

from __future__ import annotations

from plumbline.judge.mistakes.case import GradientCase, GradientMistake, Predictions, SomeParameters, scaled


def _zero(case: GradientCase) -> Predictions:
    if all(case.zeros):
        yield scaled(0.0)


def _some_zero(case: GradientCase) -> Predictions:
    if any(case.zeros):
        yield SomeParameters(scaled(0.0))


def _flipped(case: GradientCase) -> Predictions:
    yield scaled(-1.0)


MISTAKES = (
    GradientMistake("zero", "optimizer", _zero,
        "all zero",
        "call zero_grad() after the optimizer's step, not before it, and do not detach the loss", 935),
    GradientMistake("some-zero", "optimizer", _some_zero,
        "right for some parameters and zero for others",
        "check what detaches, freezes or zeroes these parameters between the loss and the step", 930),
    GradientMistake("sign-flipped", "optimizer", _flipped,
        "the right ones with the opposite sign",
        "do not negate the loss or the gradients, and create the optimizer without maximize=True", 925),
)  # fmt: skip
