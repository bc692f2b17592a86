"""The errors of a check over steps and parameters, in a bounded size: what a report draws as a heat map."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from plumbline.core.finding import ErrorGrid, Finding
from plumbline.judge.oracle.noise import TOGETHER, Deviation

MOST_PARAMETERS: Final = 24
MOST_STEPS: Final = 24
STEPS_BEFORE: Final = 4
"""Steps that a grid shows before the one of the finding, where not all of them fit."""


def with_error_grid(finding: Finding, deviations: Iterable[Deviation]) -> Finding:
    """Return a finding with the largest error of each parameter at each step, over ranks.

    Of many parameters each row is a module; of many steps those around the finding's own are kept.
    """
    found = [one for one in deviations if one.step is not None and one.parameter not in (None, TOGETHER)]
    names = _folded(dict.fromkeys(str(one.parameter) for one in found))
    steps = sorted({one.step for one in found if one.step is not None})
    begin = max(0, min(len(steps) - MOST_STEPS, bisect_left(steps, finding.step or 0) - STEPS_BEFORE))
    shown = steps[begin : begin + MOST_STEPS]
    errors: dict[tuple[str, int], float] = {}
    for one in found:
        place = names[str(one.parameter)], one.step or 0
        errors[place] = max(errors.get(place, 0.0), math.inf if math.isnan(one.x_noise) else one.x_noise)
    rows = sorted(
        dict.fromkeys(names.values()), key=lambda row: -max((errors.get((row, step), 0.0) for step in shown), default=0)
    )[:MOST_PARAMETERS]
    kept = [name for name in dict.fromkeys(names.values()) if name in rows]
    if not kept:
        return finding
    table = [[errors.get((row, step)) for step in shown] for row in kept]
    grid = ErrorGrid(tuple(kept), tuple(shown), tuple(tuple(map(_rounded, row)) for row in table))
    return replace(finding, error_grid=grid)


def _folded(names: Iterable[str]) -> dict[str, str]:
    """Return for each parameter its row: itself, or its module as deep as ``MOST_PARAMETERS`` rows allow."""
    names = list(names)
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(deepest + 1, 0, -1):
        rows = {name: ".".join(name.split(".")[:depth]) for name in names}
        if len(set(rows.values())) <= MOST_PARAMETERS:
            break
    return rows if names else {}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")
