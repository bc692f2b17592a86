"""Clipping at the wrong time, or by the wrong norm."""

from __future__ import annotations

from plumbline.judge.causes.combinations import factor_between, mean, scaled
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _before_unscaling(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.step.scale:
        yield clipped(case.expected.raw, case.clip_norm / case.step.scale)


def _before_averaging(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.world > 1:
        ranks = [
            clipped(mean_gradient(own), case.clip_norm) for rank in range(case.world) if (own := case.own_parts(rank))
        ]
        yield mean_gradient([ranks])


def _every_micro_batch(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.micro_batches > 1:
        yield mean_gradient([[clipped(mean_gradient([groups]), case.clip_norm)] for groups in case.expected.parts])
        yield mean_gradient([[clipped(part, case.clip_norm) for part in groups] for groups in case.expected.parts])


def _tensor_by_tensor(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None:
        yield {
            name: value for n, v in case.expected.raw.items() for name, value in clipped({n: v}, case.clip_norm).items()
        }


def _by_value(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None:
        limit = case.clip_norm
        yield {name: value.clamp(-limit, limit) for name, value in case.expected.raw.items()}


def _to_another_length(case: OracleGradientCase) -> Gradients:
    factor = factor_between(case.expected.raw, case.observed, default=0.0)
    if case.clip_norm is not None and factor > 0:
        yield scaled(min(factor, 1.0), case.expected.raw)


def _in_groups(case: OracleGradientCase) -> Gradients:
    """Predict the right direction of each tensor with its observed length; clipping never makes it longer."""
    if case.clip_norm is None:
        return
    total = {}
    for name, right in case.expected.raw.items():
        square = float((right * right).sum())
        factor = float((case.observed[name] * right).sum()) / square if square else 0.0
        if factor < 0:
            return
        total[name] = min(factor, 1.0) * right
    yield total


def _unasked(case: OracleGradientCase) -> Gradients:
    """Predict one clipping limit for all wrong gradients, or one for each rank's share."""
    # At a single step, any factor below 1 could come from a clipping limit.
    if case.clip_norm is None and (case.pattern.steps > 1 or not case.pattern.every_step):
        yield clipped(case.expected.raw, case.pattern.clip_limit)
        if case.pattern.clip_limits and min(case.pattern.clip_limits) > 0:
            (parts,) = case.expected.parts
            yield mean([clipped(part, limit) for part, limit in zip(parts, case.pattern.clip_limits, strict=True)])


register(
    OracleGradientCase,
    GradientHypothesis("clipped-before-unscaling", "clipping", _before_unscaling,
        "clipped while they were still multiplied by the loss scale of {scale}",
        "call scaler.unscale_(optimizer) before clipping", 990),
    GradientHypothesis("not-clipped", "clipping", lambda case: [] if case.clip_norm is None else [case.expected.raw],
        "not clipped",
        "clip before the step", 580),
    GradientHypothesis("clipped-before-averaging", "clipping", _before_averaging,
        "the mean of gradients that each rank clipped by itself",
        "clip after the all-reduce", 570),
    GradientHypothesis("clipped-every-micro-batch", "clipping", _every_micro_batch,
        "the mean of micro-batches that were clipped one by one",
        "clip once, when the window is complete", 560),
    GradientHypothesis("clipped-to-another-length", "clipping", _to_another_length,
        "right in direction but not in length",
        "compare the norm, limit and tensors that clipping uses with the workload's, on every rank", 550),
    GradientHypothesis("clipped-tensor-by-tensor", "clipping", _tensor_by_tensor,
        "clipped tensor by tensor",
        "clip by the norm of all gradients together", 540),
    GradientHypothesis("clipped-by-value", "clipping", _by_value,
        "clipped entry by entry",
        "clip by norm (clip_grad_norm_), not by value (clip_grad_value_)", 520),
    GradientHypothesis("clipped-although-nobody-asked", "clipping", _unasked,
        "clipped to a norm, although the workload does not clip",
        "check whether the trainer clips by default", 95),
    GradientHypothesis("clipped-in-groups", "clipping", _in_groups,
        "right in direction tensor by tensor, but each tensor is scaled by a different factor",
        "clip by the norm of all gradients together, so that one factor scales them all", 93),
)  # fmt: skip
