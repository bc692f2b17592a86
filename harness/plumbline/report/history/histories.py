"""How each cell ended, and how each figure changed, in run after run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from plumbline.core.finding import UNEXPLAINED, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.machine.fingerprint import ComparabilityKey
from plumbline.report.comparison.significance import MINIMUM_EFFECT, scale_of
from plumbline.report.tables.cells import DECLINED
from plumbline.report.tables.failures import is_wrong
from plumbline.report.text import shortened
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Coordinates, Measurement, Result, ending
from plumbline.results.run import Run
from plumbline.statistics.change_points import Series, change_points

LONGEST_MESSAGE: Final = 600


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended: its outcome, the cause if one is known, and whether that needs action."""

    outcome: str
    cause: str | None
    wrong: bool

    def __str__(self) -> str:
        words = "known failure" if self.outcome == KNOWN else self.outcome.replace("_", " ")
        cause = self.cause or (UNEXPLAINED if self.outcome == Outcome.FAILED.value else "")
        return f"{words}: {cause}" if cause else words


@dataclass(frozen=True)
class Span:
    """Runs in a row in which a cell ended in the same way; message and command are of the first one's first finding."""

    end: CellEnd
    runs: tuple[Run, ...]
    message: str
    reproduce: str


@dataclass(frozen=True)
class CellHistory:
    """The spans of one cell, oldest first."""

    cell: str
    subject: str
    spans: tuple[Span, ...]

    @property
    def now(self) -> Span:
        return self.spans[-1]


def cell_histories(runs: Sequence[Run]) -> list[CellHistory]:
    """Return the history of each cell that was examined, in the order of the runs, which are oldest first.

    A cell whose findings are not all there has no part in that run.
    """
    cells: dict[Coordinates, list[Span]] = {}
    names: dict[Coordinates, str] = {}
    for run in runs:
        for coordinates, results in run.whole.items():
            ordered = in_reading_order(results)
            end, spans = _end(ordered), cells.setdefault(coordinates, [])
            names[coordinates] = ordered[0].cell
            if spans and spans[-1].end == end:
                last = spans[-1]
                spans[-1] = replace(last, runs=(*last.runs, run))
            else:
                message = shortened(ordered[0].message.partition("\n")[0], LONGEST_MESSAGE)
                spans.append(Span(end, (run,), message, ordered[0].reproduce))
    return [CellHistory(names[key], key.subject, tuple(spans)) for key, spans in cells.items()]


def is_examined(history: CellHistory) -> bool:
    return history.now.end.outcome not in DECLINED


def _end(results: Sequence[Result]) -> CellEnd:
    end = ending(results)
    outcome = end.value if isinstance(end, Outcome) else end
    first = next((result for result in results if is_wrong(result)), None)
    if first is None and outcome == KNOWN:
        first = next(result for result in results if result.is_known)
    cause = None if first is None or is_unexplained(first) else first.cause
    is_bad = isinstance(end, Outcome) and end.is_bad
    return CellEnd(outcome, cause, outcome == UNEXPECTED_PASS or is_bad)


Key = tuple[Coordinates, str, "int | None", str, ComparabilityKey]


@dataclass(frozen=True)
class FigureChange:
    """The level of a figure from point ``place`` on; ``change`` is a part of the level before, or a difference.

    ``worse`` is None for a figure of which neither direction is better.
    """

    place: int
    change: float
    low: float
    high: float
    unit: str
    worse: bool | None


@dataclass(frozen=True)
class FigureHistory:
    """One figure of one cell on one machine: its measurements, oldest first, each with its run, and its changes."""

    cell: str
    subject: str
    metric: str
    rank: int | None
    machine: ComparabilityKey
    points: tuple[tuple[Run, Measurement], ...]
    changes: tuple[FigureChange, ...]


def figure_histories(runs: Sequence[Run]) -> list[FigureHistory]:
    """Return the history of each figure that has a value, and its changes; all figures are one family of tests."""
    found: dict[Key, list[tuple[Run, Measurement]]] = {}
    for run in runs:
        for one in run.measurements:
            if one.value is not None and one.samples:
                key = (one.coordinates, one.metric, one.rank, one.workload_key, run.header.fingerprint.key)
                found.setdefault(key, []).append((run, one))
    every = list(found.values())
    series = [_series(points) for points in every]
    return [
        FigureHistory(
            points[0][1].cell, key[0].subject, key[1], key[2], key[4], tuple(points),
            tuple(_change(points[0][1], point.place, *point.difference.interval, point.difference.mean)
                  for point in changes),
        )
        for key, points, changes in zip(found, every, change_points(series), strict=True)
    ]  # fmt: skip


def _series(points: Sequence[tuple[Run, Measurement]]) -> Series:
    scale = scale_of(points[0][1].unit)
    if scale.positive and any(sample <= 0 for _, one in points for sample in one.samples):
        return Series((), 0.0)  # it has no logarithm, and so no ratio
    runs = [[scale.onto(sample) for sample in one.samples] for _, one in points]
    return Series(runs, scale.least(MINIMUM_EFFECT))


def _change(one: Measurement, place: int, low: float, high: float, mean: float) -> FigureChange:
    scale = scale_of(one.unit)
    worse = None if one.better is None else (mean < 0) is (one.better == "higher")
    return FigureChange(place, scale.change(mean), scale.change(low), scale.change(high), scale.unit, worse)
