"""Gradients that are right, but stand at another parameter or in another order."""

from __future__ import annotations

from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.noise import distance


def _exchanged(case: OracleGradientCase) -> Gradients:
    raw, factor = case.expected.raw, case.common_factor
    alike = {name: [other for other in raw.values() if other.shape == value.shape] for name, value in raw.items()}
    yield from case.with_nearer(
        {n: min(few, key=lambda one: distance(case.observed[n], factor * one)) for n, few in alike.items()}
    )


def _rows_in_another_order(case: OracleGradientCase) -> Gradients:
    """Predict some tensors whose rows, or entries, are reversed or shifted by one."""
    raw = {name: value for name, value in case.expected.raw.items() if value.dim()}
    yield from case.with_nearer({name: value.flip(0) for name, value in raw.items()})
    for shift in (1, -1):
        yield from case.with_nearer({name: value.roll(shift, 0) for name, value in raw.items()})


HYPOTHESES = (
    GradientHypothesis("parameters-exchanged", "sync", _exchanged,
        "right, but some parameters have the gradient of another parameter of their shape",
        "unpack a flat buffer in the order in which it was packed, on every rank", 322),
    GradientHypothesis("rows-in-another-order", "sync", _rows_in_another_order,
        "right, but with the rows of some parameters in another order",
        "put a gathered or flat tensor together in the order in which it was taken apart", 321),
)  # fmt: skip
