"""How each figure changed over runs that are comparable: same machine, same workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plumbline.machine.fingerprint import ComparabilityKey
from plumbline.report.comparison.significance import MINIMUM_EFFECT, scale_of
from plumbline.results.records import Coordinates, Measurement
from plumbline.results.run import Run
from plumbline.statistics.change_points import Series, change_points

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
