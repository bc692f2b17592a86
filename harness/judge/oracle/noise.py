"""How much error rounding alone explains, and how many times that much a right trainer may show.

Nothing here was tuned. The scale is measured: one device, the cell's own precision, several orders of summation,
against float64. The limit follows from how many measurements there were and how rarely a right trainer may be
accused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from harness.evidence.trace import Tensors

FALSE_ALARM = 1e-9
"""The chance, for one tensor at one step, that a right trainer exceeds the limit. A run makes about 1e5 of them."""


TOGETHER = "all parameters together"
"""Stands where a tensor's name stands, for an error along the whole gradient."""


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of all entries, as float64; not finite if an entry is not."""
    return float(torch.linalg.vector_norm(tensor.double()))


def distance(left: Tensor, right: Tensor) -> float:
    """Return the 2-norm of the difference; infinite where either has an entry that is not finite."""
    value = norm(left.double() - right.double())
    return value if math.isfinite(value) else math.inf


def in_noise(error: float, noise: float) -> float:
    """Return ``error`` in multiples of ``noise``; infinite where there is an error and no finite noise explains it."""
    if error == 0:
        return 0.0
    if noise == 0 or not (math.isfinite(error) and math.isfinite(noise)):
        return math.inf
    return error / noise


@lru_cache
def limit(draws: int, false_alarm: float = FALSE_ALARM) -> float:
    """Return how many × noise a right trainer stays under, with noise the largest of ``draws`` measured errors.

    Model: an error's size is the absolute value of a normal variable, the heaviest-tailed case (a tensor with a
    single entry; more entries concentrate). Then P(|z| > c · max of n other |z|) is an integral over the
    distribution of that maximum, and c is where it falls to ``false_alarm``.
    """
    grid = 4000
    maxima = [(place + 0.5) * 9.0 / grid for place in range(grid)]
    inside = [math.erf(m / math.sqrt(2)) for m in maxima]
    density = [math.exp(-m * m / 2) * math.sqrt(2 / math.pi) for m in maxima]
    # d/dm P(max <= m), times the width of a bin.
    weights = [draws * p ** (draws - 1) * d * 9.0 / grid for p, d in zip(inside, density, strict=True)]

    def exceeded(c: float) -> float:
        return sum(w * math.erfc(c * m / math.sqrt(2)) for w, m in zip(weights, maxima, strict=True))

    low, high = 1.0, 1e6
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if exceeded(middle) > false_alarm else (low, middle)
    return high


def error_along(measured: Tensors, exact: Tensors) -> float:
    """Return how much longer or shorter a gradient is than the exact one, along that one, over all tensors together.

    Rounding goes in all directions, and a factor in this one: over many entries a small factor shows here long before
    it shows in any tensor.
    """
    size = math.hypot(*map(norm, exact.values()))
    off = sum(
        float(((measured[name].double() - right.double()) * right.double()).sum())
        for name, right in exact.items()
        if name in measured
    )
    absent = sum(norm(right) ** 2 for name, right in exact.items() if name not in measured)
    return abs(off - absent) / size if size else 0.0


class NoiseScale:
    """Collects measured errors per tensor and answers with the error that rounding explains there.

    Errors are kept relative to the rounding unit of what was added up (``unit``), so that measurements at
    different steps, where gradients are larger or smaller, serve each other.
    """

    def __init__(self) -> None:
        self._worst: dict[str, float] = {}
        self.draws = 0

    def expect(self, exact: Tensors, unit: dict[str, float], coarse: dict[str, float]) -> None:
        """Take into account that the largest entry of a tensor may be off by ``coarse``, one rounding under autocast.

        Where numbers are so small and round that sums are mostly exact, no run may happen to show one.
        """
        size, units = math.hypot(*map(norm, exact.values())), math.hypot(*unit.values())
        for name, error in coarse.items():
            if unit[name] > 0:
                self._worst[name] = max(self._worst.get(name, 0.0), error / unit[name])
                along = error * float(exact[name].abs().max()) / size if size else 0.0
                self._worst[TOGETHER] = max(self._worst.get(TOGETHER, 0.0), along / units)

    def add(self, measured: Tensors, exact: Tensors, unit: dict[str, float]) -> None:
        """Take one run in the cell's precision, ``measured``, against the same in float64, ``exact``."""
        errors = {name: distance(measured[name], exact[name]) for name in measured}
        if not all(math.isfinite(error) for error in errors.values()):
            return  # float16 overflowed, as it may: that measures no rounding
        self.draws += 1
        for name, error in errors.items():
            if unit[name] > 0:
                self._worst[name] = max(self._worst.get(name, 0.0), error / unit[name])
        if any(unit.values()):
            along = error_along(measured, exact) / math.hypot(*unit.values())
            self._worst[TOGETHER] = max(self._worst.get(TOGETHER, 0.0), along)

    def at(self, name: str, unit: float) -> float:
        """Return the noise of a tensor whose rounding unit is ``unit``: never less than one rounding of it."""
        return max(self._worst.get(name, 0.0), 1.0) * unit


def rounding_unit(parts: Iterable[Tensor], epsilon: float) -> float:
    """Return the size of one rounding of a sum: half an ulp (``epsilon``/2) of its parts' absolute values."""
    total = _absolute(parts)
    return 0.0 if total is None else norm(total) * epsilon / 2


def largest_rounding(parts: Iterable[Tensor], epsilon: float) -> float:
    """Return the size of one rounding of a sum's largest entry: half an ulp (``epsilon``/2) of its absolute value."""
    total = _absolute(parts)
    return 0.0 if total is None or not total.numel() else float(total.double().max()) * epsilon / 2


def _absolute(parts: Iterable[Tensor]) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        total = part.abs() if total is None else total + part.abs()
    return total
