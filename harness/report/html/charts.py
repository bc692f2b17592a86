"""The charts of a page, as places in per cent: the templates draw them.

Drawn by hand and not by a plotting library: a chart of ours is a few kilobytes of SVG whose text can be read on a
phone, selected and searched, and whose colours follow the page into the dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from harness.report.html.scales import Scale, Tick, in_words, positions
from harness.report.tables.figures import Measured
from harness.report.tables.run_facts import backend_in_words
from harness.results.records import Measurement

STYLES: Final = 8
"""So many curves can be told apart by colour and sign; a chart shows no more."""

MOST_BARS: Final = 40

MEMORY_PARTS: Final = {
    "tensors_parameters": "parameters",
    "tensors_gradients": "gradients",
    "tensors_optimizer": "optimizer state",
    "tensors_activations": "activations",
}
MEMORY_PEAK: Final = "memory_allocated_peak"
_WHISKERS, _BODY = (0.05, 0.95), (0.25, 0.75)


@dataclass(frozen=True)
class Point:
    """One figure: its place, that of its bounds (``y`` downwards), and what it says."""

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
    """Curves over the number of devices; ``ideal`` is where a perfect trainer's would be, None where nobody knows."""

    title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    left_out: int
    ideal: float | None = None


@dataclass(frozen=True)
class Part:
    """A piece of a bar. ``style`` is its colour."""

    at: float
    width: float
    style: int
    title: str


@dataclass(frozen=True)
class Bar:
    """One configuration's row. ``mark`` is a line across it (per cent, or None), ``text`` what stands at its end."""

    label: str
    wrong: str | None
    parts: tuple[Part, ...]
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
    title: str, metric: str, cells: Iterable[Measured], *, ideal: float | None = None
) -> Iterator[CurveChart]:
    """Yield ``metric`` over the number of devices, a curve a configuration; nothing where only one number was measured.

    What trains on one device is where the curves of its subject and precision begin. Where there are more curves than
    can be told apart, each precision has a chart of its own.
    """
    cells = [cell for cell in cells if cell.value(metric) is not None]
    groups = list(_curves(cells))
    if len({cell.devices for cell in cells}) < 2 or not groups:
        return
    if len(groups) <= STYLES:
        yield _curve_chart(title, metric, groups, ideal)
        return
    for precision in dict.fromkeys(group[-1].precision for group in groups):
        own = [group for group in groups if group[-1].precision == precision]
        yield _curve_chart(f"{title}, in {precision}", metric, own, ideal)


def memory_chart(cells: Iterable[Measured]) -> BarChart | None:
    """Return what fills the memory of the fullest rank, a row a configuration; the mark is the allocator's peak."""
    cells = [cell for cell in cells if any(cell.value(metric) is not None for metric in (*MEMORY_PARTS, MEMORY_PEAK))]
    if not cells:
        return None
    scale = Scale.over([size for cell in cells for size in (_tensors(cell), cell.value(MEMORY_PEAK) or 0.0)], "bytes")
    several = _several_subjects(cells)
    return _bar_chart("Memory of the fullest rank", scale, [_memory_bar(cell, scale, several) for cell in cells])


def distribution_chart(cells: Iterable[Measured]) -> BarChart | None:
    """Return how long single steps took, a row a configuration.

    The thin line holds nine of ten steps, the thick one the middle half, the mark is the median. The axis ends where
    the slowest configuration has done nineteen of twenty steps; a row says how far beyond that its slowest step is.
    """
    cells = [cell for cell in cells if cell.figures.get("step_p50") and len(cell.figures["step_p50"].quantiles) > 2]
    if not cells:
        return None
    scale = Scale.over([_quantile(cell.figures["step_p50"], _WHISKERS[1]) for cell in cells], "s")
    several = _several_subjects(cells)
    return _bar_chart("Time of a step", scale, [_step_bar(cell, scale, several) for cell in cells])


def configuration_of(cell: Measured, several_subjects: bool) -> str:
    """Return what tells a cell from the others of its workload: ``ddp 16, 1×4``."""
    nodes, gpus = cell.topology
    place = "" if cell.backend == "none" else f", {nodes}×{gpus}"
    return f"{_series(cell, several_subjects, nodes=False)}{place}"


def _curve_chart(title: str, metric: str, groups: Sequence[Sequence[Measured]], ideal: float | None) -> CurveChart:
    cells = [cell for group in groups for cell in group]
    places = positions([cell.devices for cell in cells])
    bounds = [bound for cell in cells for bound in _bounds(cell.figures[metric])]
    scale = Scale.over(bounds if ideal is None else [*bounds, ideal], cells[0].figures[metric].unit)
    several = _several_subjects(cells)
    return CurveChart(
        title,
        tuple(Tick(place, str(devices)) for devices, place in places.items()),
        tuple(Tick(100 - tick.at, tick.label) for tick in scale.ticks()),
        tuple(
            Curve(
                _series(group[-1], several),
                style,
                next((cell.conformance.sentence for cell in group if cell.conformance.wrong), None),
                tuple(_point(cell, metric, places, scale) for cell in group),
            )
            for style, group in enumerate(groups[:STYLES])
        ),
        len(groups[STYLES:]),
        None if ideal is None else 100 - scale.at(ideal),
    )


def _bar_chart(title: str, scale: Scale, bars: Sequence[Bar]) -> BarChart:
    return BarChart(title, tuple(scale.ticks()), tuple(bars[:MOST_BARS]), len(bars[MOST_BARS:]))


def _curves(cells: Sequence[Measured]) -> Iterable[list[Measured]]:
    alone = {(cell.subject, cell.precision): cell for cell in cells if cell.backend == "none"}
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for cell in cells:
        if cell.backend != "none":
            key = (cell.subject, cell.precision, cell.backend, cell.topology[0] > 1 and cell.topology[0])
            groups.setdefault(key, []).append(cell)
    for group in groups.values():
        first = alone.get((group[0].subject, group[0].precision))
        yield [first, *group] if first and all(cell.devices > 1 for cell in group) else group


def _series(cell: Measured, several_subjects: bool, *, nodes: bool = True) -> str:
    words = [f"{cell.subject}:"] if several_subjects else []
    words += [backend_in_words(cell.backend), cell.precision]
    if nodes and cell.topology[0] > 1:
        words.append(f"on {cell.topology[0]} nodes")
    return " ".join(words)


def _several_subjects(cells: Iterable[Measured]) -> bool:
    return len({cell.subject for cell in cells}) > 1


def _point(cell: Measured, metric: str, places: dict[int, float], scale: Scale) -> Point:
    low, value, high = _bounds(cell.figures[metric])
    nodes, gpus = cell.topology
    said = f"{nodes}×{gpus}: {in_words(value, scale.unit)}"
    if low != high:
        said += f" ({in_words(low, scale.unit)} to {in_words(high, scale.unit)})"
    at = [round(100 - scale.at(bound), 2) for bound in (value, low, high)]
    return Point(places[cell.devices], at[0], at[1], at[2], said)


def _bounds(figure: Measurement) -> tuple[float, float, float]:
    value = figure.value or 0.0
    return value if figure.low is None else figure.low, value, value if figure.high is None else figure.high


def _tensors(cell: Measured) -> float:
    return sum(cell.value(metric) or 0.0 for metric in MEMORY_PARTS)


def _memory_bar(cell: Measured, scale: Scale, several_subjects: bool) -> Bar:
    parts, end = [], 0.0
    for style, (metric, name) in enumerate(MEMORY_PARTS.items()):
        if size := cell.value(metric):
            at = scale.at(end)
            end += size
            parts.append(Part(at, round(scale.at(end) - at, 2), style, f"{name}: {in_words(size, 'bytes')}"))
    peak = cell.value(MEMORY_PEAK)
    shown = end if peak is None else peak
    return Bar(
        configuration_of(cell, several_subjects),
        cell.conformance.sentence if cell.conformance.wrong else None,
        tuple(parts),
        None if peak is None else scale.at(peak),
        in_words(shown, "bytes"),
    )


def _step_bar(cell: Measured, scale: Scale, several_subjects: bool) -> Bar:
    figure = cell.figures["step_p50"]
    parts = []
    for style, (low, high) in enumerate((_WHISKERS, _BODY)):
        begin, end = _quantile(figure, low), _quantile(figure, high)
        share = round(100 * (high - low))
        title = f"{share} % of the steps: {in_words(begin, 's')} to {in_words(end, 's')}"
        at = scale.at(begin)
        parts.append(Part(at, round(scale.at(end) - at, 2), style, title))
    median, slowest = _quantile(figure, 0.5), figure.quantiles[-1]
    return Bar(
        configuration_of(cell, several_subjects),
        cell.conformance.sentence if cell.conformance.wrong else None,
        tuple(parts),
        scale.at(median),
        in_words(median, "s"),
        in_words(slowest, "s") if slowest > scale.top else None,
    )


def _quantile(figure: Measurement, share: float) -> float:
    """Return a quantile of evenly spaced ones, by interpolation."""
    place = share * (len(figure.quantiles) - 1)
    below = int(place)
    above = min(below + 1, len(figure.quantiles) - 1)
    return figure.quantiles[below] + (place - below) * (figure.quantiles[above] - figure.quantiles[below])
