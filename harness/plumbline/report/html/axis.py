"""The axes of charts: from figures to positions in per cent, and round values as ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from plumbline.report.text import LARGEST, names_itself, unit_size, with_unit

_SMALLEST: Final = 1e-9
"""An axis that ends below this, or beyond ``LARGEST``, has no ticks but 0: their labels would not fit."""


@dataclass(frozen=True)
class Tick:
    """A line across a chart, ``at`` per cent of its length, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """An axis from 0 to ``top``. Values outside are drawn at its end."""

    top: float
    unit: str

    @classmethod
    def over(cls, values: Iterable[float], unit: str) -> Axis:
        """Return an axis that holds all of ``values``, which are finite; all of them may be 0."""
        return cls(max([0.0, *values]) or 1.0, unit)

    def at(self, value: float) -> float:
        return round(min(max(value / self.top, 0.0), 1.0) * 100, 2)

    def ticks(self) -> list[Tick]:
        """Return three to six round values, 0 among them; they show a unit only if it depends on their size."""
        size, name = unit_size(self.top, self.unit)
        name = name if names_itself(self.unit) else ""
        return [Tick(self.at(value * size), with_unit(f"{value:,.10g}", name)) for value in _round(self.top / size)]


def _round(top: float) -> list[float]:
    if not _SMALLEST < top < LARGEST:
        return [0.0]
    decade = 10.0 ** math.floor(math.log10(top))
    step = next(decade * part for part in (0.2, 0.5, 1.0, 2.0) if top / (decade * part) <= 5.5)
    return [number * step for number in range(int(top / step) + 1)]


def positions(numbers: Sequence[int]) -> dict[int, float]:
    """Return the positions of numbers of devices, in per cent, on a logarithmic axis."""
    places = {number: math.log2(number) for number in sorted(set(numbers))}
    length = max(places.values(), default=0.0) - min(places.values(), default=0.0)
    first = min(places.values(), default=0.0)
    return {number: round(100 * (place - first) / length, 2) if length else 50.0 for number, place in places.items()}
