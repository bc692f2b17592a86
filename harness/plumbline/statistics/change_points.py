"""Finds where the level of a figure changed from one run to another, among many figures that were measured run by run.

**The noise has two parts**: launches of one run differ, and runs on different days differ by more than their launches
do, because the machine drifts. Drift shows only between runs. With at least ``FEWEST_RUNS`` runs, each run is one
sample, and the noise is the spread of the runs on either side of a change, or the noise of launches if that is larger.
With fewer runs, only the noise of launches is known; the minimum effect leaves room for drift, as in a comparison of
two runs (``report.comparison.figure_changes``).

**One change**: of all positions at which a series can be cut, the one whose difference is least likely by chance. Its
p-value is multiplied by the number of positions (Bonferroni), because the largest of many differences is large even
without a change.

**Many series**: Benjamini and Hochberg's procedure over all of them limits false alarms. **Many changes**: a series
with a change is cut there, and its parts are searched in the same way (binary segmentation: Scott and Knott, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

from plumbline.statistics.intervals import CONFIDENCE, Estimate, combined_error, variance

FEWEST_RUNS: Final = 4
"""With three, one side has one run and the other two: a spread with one degree of freedom tells nothing."""

Samples = Sequence[float]
"""The values of one run's launches, on the scale on which figures are subtracted."""


@dataclass(frozen=True)
class Series:
    """A figure in one run after another, and the ``least`` difference that counts as a change."""

    runs: Sequence[Samples]
    least: float


@dataclass(frozen=True)
class ChangePoint:
    """The level changed between run ``index`` - 1 and run ``index``, by ``difference``."""

    index: int
    difference: Estimate


@dataclass(frozen=True)
class _Cut:
    """The most likely change in the runs ``begin`` to ``end`` of a series; ``chance`` is corrected for all of them."""

    series: int
    begin: int
    end: int
    point: ChangePoint
    chance: float


def change_points(every: Sequence[Series]) -> list[list[ChangePoint]]:
    """Return the changes of each series, in order. At most one in twenty of all changes found is a false alarm."""
    found: list[list[ChangePoint]] = [[] for _ in every]
    parts = [(number, 0, len(series.runs)) for number, series in enumerate(every)]
    while parts:
        cuts = [cut for number, begin, end in parts if (cut := _best_cut(every[number], number, begin, end))]
        adjusted = false_discovery_control([cut.chance for cut in cuts]) if cuts else []
        parts = []
        for cut, chance in zip(cuts, adjusted, strict=True):
            if chance <= 1 - CONFIDENCE:
                found[cut.series].append(cut.point)
                parts += [(cut.series, cut.begin, cut.point.index), (cut.series, cut.point.index, cut.end)]
    return [sorted(points, key=lambda point: point.index) for points in found]


def _best_cut(series: Series, number: int, begin: int, end: int) -> _Cut | None:
    cuts = list(_differences(series.runs[begin:end]))
    if not cuts:
        return None
    index, estimate = min(cuts, key=lambda cut: (cut[1].chance(series.least), -abs(cut[1].mean)))
    chance = min(1.0, estimate.chance(series.least) * len(cuts))
    return _Cut(number, begin, end, ChangePoint(begin + index, estimate), chance)


def _differences(runs: Sequence[Samples]) -> Iterator[tuple[int, Estimate]]:
    for index in range(1, len(runs)):
        before, after = runs[:index], runs[index:]
        noise = [one for one in (_noise_of_launches(before, after), _noise_of_runs(before, after)) if one]
        if noise:
            error, freedom = max(noise)
            yield index, Estimate(fmean(map(fmean, after)) - fmean(map(fmean, before)), error, freedom)


def _noise_of_launches(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[float, float] | None:
    """Return the standard error from launches alone, and its degrees of freedom; None if a side has no repeated one."""
    parts = []
    for side in (before, after):
        repeated = [samples for samples in side if len(samples) > 1]
        if not repeated:
            return None
        error = fmean(variance(samples) / len(samples) for samples in repeated) / len(side)
        parts.append((error, sum(len(samples) - 1 for samples in repeated)))
    return combined_error(parts)


def _noise_of_runs(before: Sequence[Samples], after: Sequence[Samples]) -> tuple[float, float] | None:
    """Return the standard error from the spread of runs, assumed equal on both sides, and its degrees of freedom."""
    freedom = len(before) + len(after) - 2
    if freedom < FEWEST_RUNS - 2:
        return None
    levels = [[fmean(samples) for samples in side] for side in (before, after)]
    squares = sum(variance(side) * (len(side) - 1) for side in levels if len(side) > 1)
    return math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after))), freedom
