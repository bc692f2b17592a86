"""Micro-batches that were weighted wrongly, lost, or not synchronised."""

from __future__ import annotations

from plumbline.judge.causes.combinations import fit, mean, scaled
from plumbline.judge.causes.gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.oracle import clipped


def _constant(case: OracleGradientCase) -> Gradients:
    if case.accumulate > 1:
        yield clipped(scaled(case.pattern.factor, case.expected.raw), case.clip_norm)


def _weighed_wrongly(case: OracleGradientCase) -> Gradients:
    if case.micro_batches > 1 and not case.pattern.only_scaled:
        fitted = fit([mean(groups) for groups in case.expected.parts], case.observed, list(case.observed))
        if fitted is not None:
            yield fitted


HYPOTHESES = (
    GradientHypothesis("scaled-by-a-constant", "accumulation", _constant,
        "{factor} × the right ones at every step",
        "what is the loss of a micro-batch divided by?", 80),
    GradientHypothesis("micro-batches-weighed-wrongly", "accumulation", _weighed_wrongly,
        "made of the right {micro_batches} micro-batches with the wrong weights",
        "what is the loss of each micro-batch divided by?", 55),
)  # fmt: skip
