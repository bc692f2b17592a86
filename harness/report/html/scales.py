"""From figures to places on a chart, and to words beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from harness.report.text import compact

_SIZES: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": (
        *((1024.0**power, f"{prefix}B") for power, prefix in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki"))),
        (1, "B"),
    ),
    "share": ((0.01, "%"),),
    "ratio": ((1.0, "×"),),
    "count": ((1.0, ""),),
}
"""Units that are written otherwise than they are counted: what each size is called, the largest first."""
_NARROWEST, _WIDEST = 1e-9, 1e15
"""Beyond these a number is written with an exponent, and no axis has room for it."""


@dataclass(frozen=True)
class Tick:
    """A line across a chart, ``at`` per cent of its length, and what stands beside it."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis from 0 to ``top``. What lies outside is put on its edge."""

    top: float
    unit: str

    @classmethod
    def over(cls, values: Iterable[float], unit: str) -> Scale:
        """Return an axis that holds all of ``values``, which are finite; their largest may well be 0."""
        return cls(max([0.0, *values]) or 1.0, unit)

    def at(self, value: float) -> float:
        """Return where a value is, in per cent of the axis."""
        return round(min(max(value / self.top, 0.0), 1.0) * 100, 2)

    def ticks(self) -> list[Tick]:
        """Return three to six round values on the axis, 0 among them; a unit without sizes is left to the title."""
        size, name = _size(self.top, self.unit)
        name = name if names_itself(self.unit) else ""
        return [Tick(self.at(value * size), _with_unit(f"{value:,.10g}", name)) for value in _round(self.top / size)]


def _round(top: float) -> list[float]:
    if not _NARROWEST < top < _WIDEST:
        return [0.0]
    decade = 10.0 ** math.floor(math.log10(top))
    step = next(decade * part for part in (0.2, 0.5, 1.0, 2.0) if top / (decade * part) <= 5.5)
    return [number * step for number in range(int(top / step) + 1)]


def positions(numbers: Sequence[int]) -> dict[int, float]:
    """Return where on an axis counts of devices stand, in per cent: doublings are steps of one length."""
    places = {number: math.log2(number) for number in sorted(set(numbers))}
    length = max(places.values(), default=0.0) - min(places.values(), default=0.0)
    first = min(places.values(), default=0.0)
    return {number: round(100 * (place - first) / length, 2) if length else 50.0 for number, place in places.items()}


def in_words(value: float, unit: str) -> str:
    """Return a figure with its unit, in three digits: ``12.3 ms``, ``1.5 GiB``, ``87 %``, ``12,300 samples/s``."""
    size, name = _size(value, unit)
    return _with_unit(digits(value / size), name)


def between(low: float, high: float, unit: str) -> str:
    """Return two bounds with their unit: ``12.1–12.5 ms``."""
    size, name = _size(max(low, high, key=abs), unit)
    return _with_unit(f"{digits(low / size)}–{digits(high / size)}", name)


def names_itself(unit: str) -> bool:
    """Say whether a figure in ``unit`` is best read with it, because its size chooses how it is called."""
    return unit in _SIZES


def _size(value: float, unit: str) -> tuple[float, str]:
    sizes = _SIZES.get(unit, ((1.0, unit),))
    return next((pair for pair in sizes if abs(value or 1.0) >= pair[0]), sizes[-1])


def _with_unit(number: str, name: str) -> str:
    return f"× {number}" if name == "×" else f"{number} {name}".rstrip()


def digits(value: float) -> str:
    """Return a number in three digits that mean something, thousands set apart; nothing for a missing one."""
    if not math.isfinite(value) or abs(value) >= _WIDEST or 0 < abs(value) < 1e-3:
        return compact(value)
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{places}f}"
