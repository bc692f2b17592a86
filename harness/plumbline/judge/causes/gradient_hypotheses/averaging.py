"""Ranks' parts that are all there, but combined wrongly."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.oracle import clipped


def _some_tensors_multiplied(case: OracleGradientCase) -> Gradients:
    yield from case.with_nearer(scaled(case.pattern.odd_factor, case.expected.raw))


def _extremes(case: OracleGradientCase) -> Gradients:
    """Predict a reduction that takes the largest, the smallest or the middle entry of all ranks."""
    if case.world == 1 or case.micro_batches > 1 or case.clip_norm is not None:
        return
    (parts,) = case.expected.parts
    for reduce in (torch.amax, torch.amin, lambda stack, dim: stack.median(dim).values):
        yield {
            name: reduce(torch.stack([part.get(name, torch.zeros_like(value)) for part in parts]), 0)
            for name, value in case.expected.raw.items()
        }


def _constant(case: OracleGradientCase) -> Gradients:
    if case.world > 1 and case.micro_batches == 1 == case.accumulate:
        yield clipped(scaled(case.pattern.factor, case.expected.raw), case.clip_norm)


HYPOTHESES = (
    GradientHypothesis("reduced-by-an-extreme", "averaging", _extremes,
        "the largest, smallest or middle entries of all ranks, not their mean",
        "the operation of the all-reduce is not a sum", 345),
    GradientHypothesis("some-tensors-multiplied", "averaging", _some_tensors_multiplied,
        "right for some parameters and {odd_factor} × the right ones for others",
        "what multiplies, or divides, the gradients of these parameters alone: a hook, a group, a reduction?", 94),
    GradientHypothesis("scaled-by-a-constant", "averaging", _constant,
        "{factor} × the right ones at every step",
        "what are the loss and the all-reduce divided by, and what are they multiplied by?", 75),
)  # fmt: skip
