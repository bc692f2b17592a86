"""The charts of a page as positions in per cent, which the templates draw as SVG.

They are drawn without a plotting library: a chart is a few kilobytes of SVG whose text can be read on a phone,
selected and searched, and whose colours follow the page's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from plumbline.report.tables.measured import MeasuredCell, bounds, has_several_subjects
from plumbline.report.text import LARGEST, in_words, names_itself, unit_size, with_unit
from plumbline.results.records import Measurement, grouped

_SMALLEST: Final = 1e-9
"""An axis that ends below this, or beyond ``LARGEST``, has only the tick 0: other labels would not fit."""


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
        return cls(max([0.0, *values]) or 1.0, unit)

    def at(self, value: float) -> float:
        return round(min(max(value / self.top, 0.0), 1.0) * 100, 2)

    def ticks(self) -> list[Tick]:
        """Return three to six round values, including 0. They show a unit only if its name depends on their size."""
        size, name = unit_size(self.top, self.unit)
        name = name if names_itself(self.unit) else ""
        top, values = self.top / size, [0.0]
        if _SMALLEST < top < LARGEST:
            decade = 10.0 ** math.floor(math.log10(top))
            step = next(decade * part for part in (0.2, 0.5, 1.0, 2.0) if top / (decade * part) <= 5.5)
            values = [number * step for number in range(int(top / step) + 1)]
        return [Tick(self.at(value * size), with_unit(f"{value:,.10g}", name)) for value in values]


def positions(numbers: Sequence[int]) -> dict[int, float]:
    places = {number: math.log2(number) for number in sorted(set(numbers))}
    length = max(places.values(), default=0.0) - min(places.values(), default=0.0)
    first = min(places.values(), default=0.0)
    return {number: round(100 * (place - first) / length, 2) if length else 50.0 for number, place in places.items()}


STYLES: Final = 8  # the number of curves that colour and sign distinguish; a chart shows no more
MOST_BARS: Final = 40

MEMORY_PARTS: Final = {
    "tensors_parameters": "parameters",
    "tensors_gradients": "gradients",
    "tensors_optimizer": "optimizer state",
    "tensors_activations": "activations",
}
STEP_SHARES: Final = {
    "share_compute": "computing",
    "share_exposed_communication": "exposed communication",
    "share_data": "data",
    "share_idle": "idle",
}
MEMORY_PEAK: Final = "memory_allocated_peak"
_WHISKERS, _BODY = (0.05, 0.95), (0.25, 0.75)


@dataclass(frozen=True)
class Point:
    """One figure: its position, its bounds (``y`` points downwards), and its tooltip."""

    x: float
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Curve:
    """One configuration over numbers of devices. ``style`` is its colour and sign, ``wrong`` why it does not count."""

    label: str
    style: int
    wrong: str | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class CurveChart:
    """Curves over the number of devices; ``ideal`` is the position of ideal scaling, None if it is unknown."""

    title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    left_out: int
    ideal: float | None = None


@dataclass(frozen=True)
class BarPart:
    """A segment of a bar. ``style`` is its colour."""

    at: float
    width: float
    style: int
    title: str


@dataclass(frozen=True)
class Bar:
    """One configuration's row. ``mark`` is a line across it (per cent, or None), ``text`` the label at its end."""

    label: str
    wrong: str | None
    parts: tuple[BarPart, ...]
    mark: float | None
    text: str
    beyond: str | None = None


@dataclass(frozen=True)
class BarChart:
    """Rows on one axis."""

    title: str
    ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...]
    left_out: int


def curve_charts(
    title: str, metric: str, cells: Iterable[MeasuredCell], *, ideal: float | None = None
) -> Iterator[CurveChart]:
    """Yield ``metric`` over the number of devices, one curve per configuration; nothing if there is only one number.

    A cell on one device is the first point of the curves of its subject and precision. If there are more than
    ``STYLES`` curves, each precision has its own chart.
    """
    cells = [cell for cell in cells if cell.value(metric) is not None]
    groups = list(_curves(cells))
    if len({cell.at.devices for cell in cells}) < 2 or not groups:
        return
    if len(groups) <= STYLES:
        yield _curve_chart(title, metric, groups, ideal)
        return
    for precision in dict.fromkeys(group[-1].at.precision for group in groups):
        own = [group for group in groups if group[-1].at.precision == precision]
        yield _curve_chart(f"{title}, in {precision}", metric, own, ideal)


def memory_chart(cells: Iterable[MeasuredCell]) -> BarChart | None:
    cells = [cell for cell in cells if any(cell.value(metric) is not None for metric in (*MEMORY_PARTS, MEMORY_PEAK))]
    tensors = {cell.at: sum(cell.value(metric) or 0.0 for metric in MEMORY_PARTS) for cell in cells}
    axis = Axis.over([size for cell in cells for size in (tensors[cell.at], cell.value(MEMORY_PEAK) or 0.0)], "bytes")

    def bar(cell: MeasuredCell, axis: Axis, label: str) -> Bar:
        peak = cell.value(MEMORY_PEAK)
        text = in_words(tensors[cell.at] if peak is None else peak, axis.unit)
        mark = None if peak is None else axis.at(peak)
        return Bar(label, cell.why_wrong, tuple(_stacked(cell, MEMORY_PARTS, axis)), mark, text)

    return _bar_chart("Memory of the rank that uses the most", axis, cells, bar)


def share_chart(cells: Iterable[MeasuredCell]) -> BarChart | None:
    cells = [cell for cell in cells if all(cell.value(metric) is not None for metric in STEP_SHARES)]

    def bar(cell: MeasuredCell, axis: Axis, label: str) -> Bar:
        computing = in_words(cell.value("share_compute") or 0.0, axis.unit)
        return Bar(label, cell.why_wrong, tuple(_stacked(cell, STEP_SHARES, axis)), None, f"{computing} computing")

    return _bar_chart("Where the time of a step goes", Axis(1.0, "share"), cells, bar)


def distribution_chart(cells: Iterable[MeasuredCell]) -> BarChart | None:
    """Return how long single steps took: lines span 5 to 95 % and the middle half of them; the mark is the median."""
    cells = [cell for cell in cells if cell.figures.get("step_p50") and len(cell.figures["step_p50"].quantiles) > 2]
    axis = Axis.over([_quantile(cell.figures["step_p50"], _WHISKERS[1]) for cell in cells], "s")
    return _bar_chart("Time of a step", axis, cells, _step_bar)


def _curve_chart(title: str, metric: str, groups: Sequence[Sequence[MeasuredCell]], ideal: float | None) -> CurveChart:
    cells = [cell for group in groups for cell in group]
    places = positions([cell.at.devices for cell in cells])
    figures = [bound for cell in cells for bound in bounds(cell.figures[metric])]
    axis = Axis.over(figures if ideal is None else [*figures, ideal], cells[0].figures[metric].unit)
    several = has_several_subjects(cells)
    return CurveChart(
        title,
        tuple(Tick(place, str(devices)) for devices, place in places.items()),
        tuple(Tick(100 - tick.at, tick.label) for tick in axis.ticks()),
        tuple(
            Curve(
                group[-1].series(several_subjects=several)
                + (f" on {group[-1].at.num_nodes} nodes" if group[-1].at.num_nodes > 1 else ""),
                style,
                next(filter(None, (cell.why_wrong for cell in group)), None),
                tuple(_point(cell, metric, places, axis) for cell in group),
            )
            for style, group in enumerate(groups[:STYLES])
        ),
        len(groups[STYLES:]),
        None if ideal is None else 100 - axis.at(ideal),
    )


def _bar_chart(
    title: str, axis: Axis, cells: Sequence[MeasuredCell], bar: Callable[[MeasuredCell, Axis, str], Bar]
) -> BarChart | None:
    if not cells:
        return None
    several = has_several_subjects(cells)
    bars = [bar(cell, axis, cell.configuration(several_subjects=several)) for cell in cells[:MOST_BARS]]
    return BarChart(title, tuple(axis.ticks()), tuple(bars), len(cells[MOST_BARS:]))


def _curves(cells: Sequence[MeasuredCell]) -> Iterable[list[MeasuredCell]]:
    alone = {(cell.at.subject, cell.at.precision): cell for cell in cells if cell.at.backend == "none"}
    spread = [cell for cell in cells if cell.at.backend != "none"]
    groups = grouped(spread, lambda cell: (cell.at.subject, cell.at.precision, cell.at.backend, cell.at.num_nodes))
    for group in groups.values():
        first = alone.get((group[0].at.subject, group[0].at.precision))
        yield [first, *group] if first and all(cell.at.devices > 1 for cell in group) else group


def _point(cell: MeasuredCell, metric: str, places: dict[int, float], axis: Axis) -> Point:
    low, value, high = bounds(cell.figures[metric])
    nodes, gpus = cell.at.topology
    title = f"{nodes}×{gpus}: {in_words(value, axis.unit)}"
    if low != high:
        title += f" ({in_words(low, axis.unit)} to {in_words(high, axis.unit)})"
    at = [round(100 - axis.at(bound), 2) for bound in (value, low, high)]
    return Point(places[cell.at.devices], at[0], at[1], at[2], title)


def _stacked(cell: MeasuredCell, parts: Mapping[str, str], axis: Axis) -> Iterator[BarPart]:
    end = 0.0
    for style, (metric, name) in enumerate(parts.items()):
        if size := cell.value(metric):
            at = axis.at(end)
            end += size
            yield BarPart(at, round(axis.at(end) - at, 2), style, f"{name}: {in_words(size, axis.unit)}")


def _step_bar(cell: MeasuredCell, axis: Axis, label: str) -> Bar:
    figure = cell.figures["step_p50"]
    parts = []
    for style, (low, high) in enumerate((_WHISKERS, _BODY)):
        begin, end = _quantile(figure, low), _quantile(figure, high)
        share = round(100 * (high - low))
        title = f"{share} % of the steps: {in_words(begin, 's')} to {in_words(end, 's')}"
        at = axis.at(begin)
        parts.append(BarPart(at, round(axis.at(end) - at, 2), style, title))
    median, slowest = _quantile(figure, 0.5), figure.quantiles[-1]
    beyond = in_words(slowest, "s") if slowest > axis.top else None
    return Bar(label, cell.why_wrong, tuple(parts), axis.at(median), in_words(median, "s"), beyond)


def _quantile(figure: Measurement, share: float) -> float:
    return float(np.interp(share * (len(figure.quantiles) - 1), range(len(figure.quantiles)), figure.quantiles))
