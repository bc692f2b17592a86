"""Gradients that are absent, zero or negated when the optimizer steps."""

from __future__ import annotations

from plumbline.judge.causes.gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.oracle import clipped


def _absent(case: OracleGradientCase) -> Gradients:
    right, observed = case.expected.contract, case.step.gradients
    if any(name not in observed for name in right):
        yield {name: value for name, value in right.items() if name in observed}
        yield clipped({name: value for name, value in case.expected.raw.items() if name in observed}, case.clip_norm)


HYPOTHESES = (
    GradientHypothesis("parameter-not-in-optimizer", "optimizer", _absent,
        "right, but some parameters had none when the optimizer stepped",
        "are all parameters in the optimizer's groups, and do all of them have a gradient at the step?", 940),
)  # fmt: skip
