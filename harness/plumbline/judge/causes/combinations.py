"""Sums, multiples, lengths and least-squares fits of gradients, each a set of named tensors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from plumbline.evidence.trace import Tensors
from plumbline.judge.oracle.noise import distance, norm
from plumbline.judge.oracle.oracle import mean_gradient

TO_AVOID_ZERO = 1e-6
"""What ``clip_grad_norm_`` adds to the norm before it divides by it."""

CONCLUSIVE = 4
"""A fit needs at least this many equations for each unknown, or it would fit anything."""


def scaled(factor: float, gradient: Tensors) -> Tensors:
    return {name: value * factor for name, value in gradient.items()}


def added(left: Tensors, right: Tensors) -> Tensors:
    """Return the sum, with the names of the left."""
    return {name: left[name] + right[name].double() if name in right else left[name] for name in left}


def clip_limit_of(clipped: float, whole: float) -> float:
    """Return the clipping limit that shortens a gradient of length ``whole`` to length ``clipped``.

    ``clip_grad_norm_`` adds 1e-6 to the length before it divides.
    """
    return clipped * (whole + TO_AVOID_ZERO) / whole if whole else 0.0


def clip_factor(limit: float | None, size: float) -> float:
    """Return the factor by which ``clip_grad_norm_`` multiplies gradients if it computes ``size`` as their norm."""
    return min(1.0, (limit or 0.0) / (size + TO_AVOID_ZERO))


def total_distance(left: Tensors, right: Tensors) -> float:
    """Return the 2-norm of the difference of all tensors together."""
    return math.hypot(*(distance(left[name], right[name]) for name in right))


def flat(gradient: Tensors, like: Tensors, names: Sequence[str]) -> torch.Tensor:
    """Return the named tensors as one column; what is absent counts as zero."""
    return torch.cat([gradient.get(name, torch.zeros_like(like[name])).double().flatten() for name in names])


def factor_between(right: Tensors, observed: Tensors, default: float = 1.0) -> float:
    """Return the factor that brings ``right`` nearest to ``observed``; ``default`` if ``right`` is zero."""
    names = list(right)
    expected, actual = (flat(gradient, right, names) for gradient in (right, observed))
    return float(actual @ expected / (expected @ expected)) if norm(expected) else default


def common_factor(right: Tensors, observed: Tensors) -> float:
    """Return the factor that brings most tensors of ``right`` nearest to the observed ones; 1 if all are zero.

    Tensors observed as zeros are left out, because half of them would make the factor zero.
    """
    factors = [factor_between({n: value}, observed) for n, value in right.items() if norm(value) and norm(observed[n])]
    # The low median is some tensor's factor. The mean of two middle factors may be no tensor's.
    return statistics.median_low(factors) if factors else 1.0


def fit_weights(parts: Sequence[Tensors], target: Tensors, names: Sequence[str]) -> list[float] | None:
    """Return the weights of the sum of parts that is nearest to the target; None if a fit would not be conclusive."""
    if not names or not parts:
        return None
    columns = torch.stack([flat(part, target, names) for part in parts], dim=1)
    wanted = flat(target, target, names)
    if columns.shape[0] < CONCLUSIVE * columns.shape[1] or not bool(torch.isfinite(wanted).all()):
        return None
    weights: list[float] = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0].tolist()
    return weights


def weighted(parts: Sequence[Tensors], weights: Sequence[float], like: Tensors) -> Tensors:
    """Return the weighted sum of parts, with the names of ``like``."""
    total = {name: torch.zeros_like(value) for name, value in like.items()}
    for weight, part in zip(weights, parts, strict=True):
        for name in total.keys() & part.keys():
            total[name] = total[name] + weight * part[name]
    return total


def fit(parts: Sequence[Tensors], target: Tensors, names: Sequence[str]) -> Tensors | None:
    """Return the weighted sum of the parts that is nearest to the target; None if a fit would not be conclusive."""
    weights = fit_weights(parts, target, names)
    return None if weights is None else weighted(parts, weights, target)


def mean(parts: Sequence[Tensors]) -> Tensors:
    """Return the mean of parts; what is absent in one counts as zero."""
    return mean_gradient([parts])
