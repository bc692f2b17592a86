"""Small pictures: a figure over runs, and a badge for a README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from plumbline.report.history.histories import CellHistory, FigureHistory, is_examined
from plumbline.report.text import counted, printable
from plumbline.results.records import KNOWN

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


GOOD, BAD, UNCLEAR = "#00664b", "#a83f00", "#5b6370"
"""Each has a contrast of at least 4.5 with white."""

_LABEL: Final = "#30363d"
_WIDTH: Final = 6.6
"""Pixels of a character at 11 pixels; ``textLength`` fits the text to what was reckoned."""


def badge_of(cells: Sequence[CellHistory]) -> str:
    examined = [cell for cell in cells if is_examined(cell)]
    wrong = sum(cell.now.end.wrong for cell in examined)
    known = sum(cell.now.end.outcome == KNOWN for cell in examined)
    if wrong:
        return badge("plumbline", f"{wrong} of {counted(len(examined), 'cell')} wrong", BAD)
    if not examined:
        return badge("plumbline", "nothing examined", UNCLEAR)
    right = f"{counted(len(examined) - known, 'cell')} right"
    return badge("plumbline", f"{right}, {counted(known, 'known failure')}" if known else right, GOOD)


def badge(label: str, value: str, colour: str) -> str:
    """Return an SVG with two fields; its title has both texts, for screen readers."""
    widths = [round(len(text) * _WIDTH) + 12 for text in (label, value)]
    title = f"{printable(label)}: {printable(value)}"
    texts = "".join(
        f'<text x="{sum(widths[:place]) + width / 2}" y="14" textLength="{width - 12}">{escape(printable(text))}</text>'
        for place, (text, width) in enumerate(zip((label, value), widths, strict=True))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" '
        f"aria-label={quoteattr(title)}><title>{escape(title)}</title>"
        f'<clipPath id="round"><rect width="{sum(widths)}" height="20" rx="3"/></clipPath><g clip-path="url(#round)">'
        f'<rect width="{widths[0]}" height="20" fill="{_LABEL}"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )
