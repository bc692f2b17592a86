"""Whether a call is a function of what was recorded of it: its outputs against those of its replays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SPREAD = 4.0
"""Two results that differ by rounding alone are at most this many times as far apart as one of them is from the exact
one: twice as far if both err as much, and twice that because a distance of few numbers varies."""


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest relative distance between outputs, infinite where only one of two is a number."""
    return max((_distance(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether outputs are equal bit for bit; NaN equals NaN."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def reproduces(recorded: Sequence[Tensor], native: Sequence[Tensor], exact: Sequence[Tensor], eps: float) -> bool:
    """Return whether a replay in the training's own precision gives what was recorded, up to rounding.

    ``eps`` is the relative spacing of the coarsest precision that the call computes in. Compiled code and kernels that
    are not deterministic round in other ways than the replay. How far that goes is measured: the replay rounds, too.
    Where fewer than half of the digits are left, it is not rounding that is measured.
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
