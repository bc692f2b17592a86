"""Noise, the error that rounding alone explains; errors in multiples of it; and the limits for a correct training.

No constant is tuned. For a subject, noise is measured on one device, in the cell's precision and in several orders of
summation, against float64. The limit follows from the number of measurements and the probability of a false alarm. For
a script nothing can be measured again, so the rounding of its sums is bounded instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.evidence.trace import Tensors

FALSE_ALARM = 1e-9
"""The probability that a correct trainer exceeds the limit in one tensor at one step. A run has about 1e5 of these."""

NOISE_RUNS = 12
"""Measurements of noise in a cell, at least: twelve put the limit below 10 × noise."""

TOGETHER = "all parameters together"
"""The name, in place of a parameter's, of an error along the whole gradient."""


UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff of each format: half the distance from 1 to the next larger number."""

UNDERFLOW = {"float16": 2.0**-25}
"""Half the distance between the smallest numbers of a format, for formats in which gradients can be that small."""

PROJECTION_MARGIN = 2.0
"""The factor by which a projection's norm may exceed the tensor's: 11 standard deviations of χ with 64 degrees of
freedom."""


@dataclass(frozen=True)
class Deviation:
    """An error in multiples of noise, and its place; ``limit`` is the largest right error there, if limits vary."""

    x_noise: float
    step: int | None = None
    parameter: str | None = None
    rank: int | None = None
    limit: float | None = None

    @property
    def is_right(self) -> bool:
        """Whether the error has a limit of its own and does not exceed it."""
        return self.limit is not None and self.x_noise <= self.limit


def larger(left: Deviation | None, right: Deviation) -> Deviation:
    """Return the larger error, or the earlier one of equals; NaN is the largest."""
    if left is None or math.isnan(right.x_noise) or right.x_noise > left.x_noise:
        return right
    return left


def largest(deviations: Iterable[Deviation]) -> Deviation:
    """Return the largest error, or the earliest of equals; no error if there is none."""
    return reduce(larger, deviations, Deviation(0.0))


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of all entries, as float64; not finite if an entry is not."""
    return float(torch.linalg.vector_norm(tensor.double()))


def length(tensors: Tensors) -> float:
    return math.hypot(*map(norm, tensors.values()))


def is_finite(tensors: Tensors) -> bool:
    return all(bool(value.isfinite().all()) for value in tensors.values())


def distance(left: Tensor, right: Tensor) -> float:
    """Return the 2-norm of the difference; infinite if either has an entry that is not finite."""
    value = norm(left.double() - right.double())
    return value if math.isfinite(value) else math.inf


def in_noise(error: float, noise: float) -> float:
    """Return ``error`` in multiples of ``noise``; infinite if no finite noise explains it."""
    if error == 0:
        return 0.0
    if noise == 0 or not (math.isfinite(error) and math.isfinite(noise)):
        return math.inf
    return error / noise


@lru_cache
def limit(runs: int = NOISE_RUNS, false_alarm: float = FALSE_ALARM) -> float:
    """Return the limit for a correct trainer in × noise, where noise is the largest of ``runs`` measured errors.

    Model: an error's size is the absolute value of a normal variable, the heaviest-tailed case (a tensor with a
    single entry; more entries concentrate). Then P(|z| > c · max of n other |z|) is an integral over the
    distribution of that maximum, and c is where it falls to ``false_alarm``.
    """
    grid = 4000
    maxima = (torch.arange(grid, dtype=torch.float64) + 0.5) * 9.0 / grid
    inside = torch.erf(maxima / math.sqrt(2))
    density = torch.exp(-maxima * maxima / 2) * math.sqrt(2 / math.pi)
    # d/dm P(max <= m), times the width of a bin.
    weights = runs * inside ** (runs - 1) * density * 9.0 / grid

    def exceeded(c: float) -> float:
        return float((weights * torch.erfc(c * maxima / math.sqrt(2))).sum())

    low, high = 1.0, 1e6
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if exceeded(middle) > false_alarm else (low, middle)
    return high


def error_along(measured: Tensors, exact: Tensors) -> float:
    """Return how much longer or shorter a gradient is than the exact one, along its direction, over all tensors.

    Rounding goes in all directions, but a factor only in this one: over many entries, a small factor shows here long
    before it shows in any tensor.
    """
    size = length(exact)
    off = sum(
        float(((measured[name].double() - right.double()) * right.double()).sum())
        for name, right in exact.items()
        if name in measured
    )
    absent = sum(norm(right) ** 2 for name, right in exact.items() if name not in measured)
    return abs(off - absent) / size if size else 0.0


def nudged(weights: Tensors, generator: torch.Generator) -> Tensors:
    """Return float64 weights, each one rounding larger or smaller.

    This changes the sums in a layer as another order of summation does.
    """
    epsilon = torch.finfo(torch.float64).eps
    return {
        name: weight.double() * (1 + epsilon * torch.randn(weight.shape, generator=generator).sign().double())
        for name, weight in weights.items()
    }


def within_a_rounding(weights: Tensors, generator: torch.Generator, epsilon: float) -> Tensors:
    """Return float64 weights, each less than one rounding of precision ``epsilon`` larger or smaller.

    Results are then rounded differently even if the order of summation makes no difference.
    """
    return {
        name: weight.double() * (1 + epsilon * (2 * torch.rand(weight.shape, generator=generator).double() - 1))
        for name, weight in weights.items()
    }


def next_to_nothing(tensors: Tensors) -> list[str]:
    """Return the tensors below float32's rounding of all of them together, which may really be zero."""
    whole = length(tensors)
    return [name for name, value in tensors.items() if norm(value) <= torch.finfo(torch.float32).eps * whole]


def rounding_alone(exact: Tensors, moved: Sequence[Tensors], names: Iterable[str]) -> dict[str, float]:
    """Return the tensors that are really zero because everything cancels out, and how large float64 makes them.

    Their digits are only rounding: moving the weights by one rounding of float64 changes at least half of the digits.

    Args:
        exact: the tensors in float64.
        moved: the same at ``nudged`` weights.
        names: the tensors to consider.
    """
    most = math.sqrt(torch.finfo(torch.float64).eps)
    sizes = {}
    for name in names:
        others = [one[name] for one in moved if name in one]
        if any(distance(other, exact[name]) > most * norm(exact[name]) for other in others):
            sizes[name] = max(map(norm, (exact[name], *others)))
    return sizes


class NoiseScale:
    """Collects measured errors by tensor, and returns the noise of a tensor.

    Errors are stored relative to the tensor's rounding unit, so that steps with larger and smaller gradients can be
    combined. A tensor that is really zero has the unit zero, but rounding may still change it: then the error itself is
    stored.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._of_zeros: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self.runs = 0

    def add(self, measured: Tensors, exact: Tensors, units: dict[str, float], *, repeated: bool = False) -> None:
        """Add one run in the cell's precision, ``measured``, and the same in float64, ``exact``.

        A ``repeated`` run can raise the noise, but does not count as a run, which would lower the limit.
        """
        # The weights of a run can change the experts to which a sample is routed.
        shared = measured.keys() & exact.keys() & units.keys()
        errors = {name: distance(measured[name], exact[name]) for name in measured if name in shared}
        if not all(math.isfinite(error) for error in errors.values()):
            return  # float16 overflowed, which measures no rounding
        self.runs += not repeated
        for name, error in errors.items():
            self._take(name, error, units[name])
            if units[name] > 0:
                self._measured[name] = max(self._measured.get(name, 0.0), error / units[name])
        self._take(TOGETHER, error_along(measured, exact), math.hypot(*units.values()))

    def add_rounding(self, exact: Tensors, units: dict[str, float], largest_units: dict[str, float]) -> None:
        """Take into account that autocast may round the largest entry of a tensor.

        With small round numbers most sums are exact, and no run may happen to show that rounding.
        """
        size, together = length(exact), math.hypot(*units.values())
        for name, error in largest_units.items():
            self._take(name, error, units[name])
            if units[name] > 0:
                along = error * float(exact[name].abs().max()) / size if size else 0.0
                self._take(TOGETHER, along, together)

    def add_rounding_alone(self, sizes: dict[str, float], growth: float) -> None:
        """Take into account how large rounding makes tensors that are really zero.

        Whether a run shows it may depend on what the loss was divided by, because everything cancels out with some
        divisors.

        Args:
            sizes: how large float64 makes them.
            growth: how much coarser the cell's roundings are than float64's.
        """
        for name, size in sizes.items():
            self._take(name, growth * size, 0.0)

    def _take(self, name: str, error: float, unit: float) -> None:
        if unit > 0:
            self._largest[name] = max(self._largest.get(name, 0.0), error / unit)
        elif unit == 0:
            self._of_zeros[name] = max(self._of_zeros.get(name, 0.0), error)

    def at(self, name: str, unit: float) -> float:
        """Return the noise of a tensor whose rounding unit is ``unit``: never less than one rounding of it."""
        return self._of_zeros.get(name, 0.0) if unit == 0 else max(self._largest.get(name, 0.0), 1.0) * unit

    def measured(self, name: str, unit: float) -> float:
        """Return the largest error of a tensor in any run: rounding does at least this much."""
        return self._measured.get(name, 0.0) * unit

    @property
    def limit(self) -> float:
        """The limit for a correct trainer, in × noise."""
        return limit(max(self.runs, 2))


def rounding_unit(parts: Iterable[Tensor], epsilon: float) -> float:
    """Return the size of one rounding of a sum: half an ulp (``epsilon``/2) of its parts' absolute values."""
    return norm(absolute_sum(parts)) * epsilon / 2


def coarsest_unit(formats: Iterable[str]) -> float:
    """Return the largest unit roundoff of formats; an unknown format counts as float32."""
    return max(UNIT_ROUNDOFF.get(name, UNIT_ROUNDOFF["float32"]) for name in formats)


def sum_bound(roundings: int, units: Tensor, sizes: Tensor, underflow: Tensor) -> Tensor:
    """Return a bound on the rounding error of each of several sums, whose projections are compared.

    Each of the n additions and scalings rounds by at most a unit of the partial sums, whose norms are at most the sum
    of the norms of the terms (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Near a format's smallest
    numbers, each rounds by a constant as well (2.4).

    Args:
        roundings: the number of additions and scalings.
        units: the unit roundoff of each sum.
        sizes: the sum of the norms of the terms.
        underflow: the norm of the constant part of one rounding.
    """
    # The last term is the rounding of the projections themselves, which are sums in float64.
    return roundings * ((units + 2.0**-50) * sizes + underflow)


def absolute_sum(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, (part.abs() for part in parts))


aten = torch.ops.aten


class PartialSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes each product of two matrices as a sum of ``parts`` products, each rounded to the matrices' dtype.

    An optimizer that multiplies sharded matrices does so. Muon multiplies in bfloat16: a sum over shards rounds each
    part's sum, so right results differ by more than the order of one sum explains. Optimizers without matrix products
    are not affected.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the operator's result; a matrix product is computed in parts."""
        settings = dict(kwargs or {})
        if func is aten.mm.default:
            return self._summed(args[0], args[1], torch.mm)
        if func is aten.bmm.default:
            return self._summed(args[0], args[1], torch.bmm)
        if func is aten.addmm.default:
            return settings.get("beta", 1) * args[0] + settings.get("alpha", 1) * self._summed(
                args[1], args[2], torch.mm
            )
        return func(*args, **settings)

    def _summed(self, left: Tensor, right: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        pairs = zip(left.tensor_split(self._parts, -1), right.tensor_split(self._parts, -2), strict=True)
        total, *others = [product(a, b) for a, b in pairs if a.shape[-1]] or [product(left, right)]
        for other in others:
            total = total + other
        return total
