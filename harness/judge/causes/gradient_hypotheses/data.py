"""Samples with the right ids but other contents."""

from __future__ import annotations

from harness.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from harness.judge.oracle.layout import samples
from harness.judge.oracle.oracle import clipped, mean_gradient


def _held_out(case: GradientCase) -> Gradients:
    """Predict a training on the samples of the same numbers in the held-out set."""
    counterfactuals = case.counterfactuals
    layout = counterfactuals.layout(case.index)
    with counterfactuals.at(case.index) as oracle:
        training, held_out = oracle.data, counterfactuals.held_out(oracle)
        if max(samples(layout), default=0) >= len(held_out):
            return
        oracle.data = held_out
        parts = oracle.group_gradients(layout)
        oracle.data = training
    yield clipped(mean_gradient(parts), case.clip_norm)


HYPOTHESES = (
    GradientHypothesis("trained-on-held-out-data", "data", _held_out,
        "those of the held-out samples",
        "is a loader of the validation set used for training?", 210),
)  # fmt: skip
