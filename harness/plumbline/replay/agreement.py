"""Compares a call's outputs with those of its replays, to tell whether the recording determines the outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPREAD = 4.0
"""Two results that differ only by rounding are at most this many times as far from each other as one of them is from
the exact result: twice as far if both have the same error, and twice that because a distance over few numbers
varies."""


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest relative distance between outputs; infinite if shapes or places of finite entries differ."""
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether outputs are equal bit for bit; NaN equals NaN."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def reproduces(recorded: Sequence[Tensor], native: Sequence[Tensor], exact: Sequence[Tensor], eps: float) -> bool:
    """Return whether a replay in the training's own precision gives the recorded outputs, up to rounding.

    ``eps`` is the relative spacing of the coarsest precision that the call computes in. Compiled code and
    non-deterministic kernels round differently from the replay. Their rounding noise is estimated by the distance
    between the native and the exact replay. If fewer than half of the digits agree there, the distance is not rounding,
    and the result is False.
    """
    if equal(recorded, native):
        return True
    noise = distance(native, exact)
    return noise <= math.sqrt(eps) and distance(recorded, native) <= SPREAD * max(noise, eps)


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    numbers = a.isfinite()
    if not torch.equal(numbers, b.isfinite()):
        return float("inf")
    apart, size = float((a - b)[numbers].abs().norm()), float(b[numbers].abs().norm())
    return apart / size if size else float("inf") if apart else 0.0
