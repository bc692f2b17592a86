"""A cause that is not in Plumbline: the last micro-batch of a window counts half."""

from __future__ import annotations

from plumbline.judge.causes import Combination, GradientCase, Hypothesis, register


def last_halved(case):
    if case.micro_batches > 1:
        yield Combination(lambda rank, place, count: 0.5 if place == count - 1 else 1.0)


register(
    GradientCase,
    Hypothesis(
        name="last-halved",
        family="accumulation",
        predict=last_halved,
        description="with half of the last of {micro_batches} micro-batches",
        hint="divide every micro-batch of the window by the same number",
        specificity=600,
    ),
)
