"""A small picture of one figure over runs: a point with its interval for each, and a line where the level changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from plumbline.report.history.figure_history import FigureHistory

WIDTH, HEIGHT, MARGIN = 160.0, 36.0, 4.0


@dataclass(frozen=True)
class Point:
    """A run: where it lies, and from where to where its interval reaches, in pixels."""

    x: float
    y: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Curve:
    """The picture; ``levels`` are the beginnings and ends of level stretches, ``cuts`` where the level changed."""

    points: tuple[Point, ...]
    levels: tuple[tuple[float, float, float], ...]
    cuts: tuple[float, ...]


def curve(history: FigureHistory) -> Curve:
    """Return the picture of a figure; its vertical axis begins at the smallest bound, not at 0."""
    figures = [one for _, one in history.points]
    lows = [one.value if one.low is None else one.low for one in figures]
    highs = [one.value if one.high is None else one.high for one in figures]
    least, most = min(low for low in lows if low is not None), max(high for high in highs if high is not None)

    def y(value: float | None) -> float:
        assert value is not None
        share = (value - least) / (most - least) if most > least else 0.5
        return round(HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN), 1)

    places = list(_places(len(figures)))
    points = tuple(
        Point(x, y(one.value), y(high), y(low)) for x, one, low, high in zip(places, figures, lows, highs, strict=True)
    )
    ends = [0, *(change.place for change in history.changes), len(points)]
    levels = []
    for begin, end in pairwise(ends):
        values = [one.value for one in figures[begin:end] if one.value is not None]
        levels.append((points[begin].x, points[end - 1].x, y(sum(values) / len(values))))
    cuts = tuple((points[change.place - 1].x + points[change.place].x) / 2 for change in history.changes)
    return Curve(points, tuple(levels), cuts)


def _places(count: int) -> Iterator[float]:
    step = (WIDTH - 2 * MARGIN) / max(1, count - 1)
    yield from (round(MARGIN + place * step, 1) if count > 1 else WIDTH / 2 for place in range(count))
