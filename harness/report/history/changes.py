"""Everything that changed between two runs: cells that end differently, figures at another level."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from harness.report.comparison.significance import POINTS, RATIO
from harness.report.history.cell_history import CellHistory, Span
from harness.report.history.figure_history import FigureChange, FigureHistory
from harness.report.history.recorded_runs import differing, traits
from harness.report.text import digits
from harness.results.run import Run


@dataclass(frozen=True)
class Change:
    """What was seen first in ``run``, and what else differed from the run before.

    ``kind`` is ``worse`` where something went wrong or a figure lost, ``better`` where the opposite, else ``other``.
    ``anchor`` is the address of its row on the page, ``details`` are further sentences.
    """

    kind: Literal["worse", "better", "other"]
    subject: str
    what: str
    sentence: str
    run: Run
    before: Run
    anchor: str
    details: tuple[str, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """What differs between the two runs and may be the reason."""
        return differing(traits(self.before, self.subject), traits(self.run, self.subject))


def all_changes(cells: Iterable[CellHistory], figures: Iterable[FigureHistory]) -> list[Change]:
    """Return every change, the newest first."""
    found = [_of_cell(cell, before, after) for cell in cells for before, after in pairwise(cell.spans)]
    found += [_of_figure(figure, change) for figure in figures for change in figure.changes]
    return sorted(found, key=lambda change: (change.run.header.started, change.kind == "worse"), reverse=True)


def anchor(*words: object) -> str:
    """Return an address within a page, of letters, digits and signs that need no escape."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(map(str, words)))


def in_words(change: FigureChange) -> str:
    """Return by how much a figure changed, with the interval: ``−12 % (−14 to −10)``."""
    factor = 1.0 if not change.unit else 100.0
    low, high = sorted((change.low, change.high))
    return f"{_signed(change.change * factor)} {change.unit}".rstrip() + (
        f" ({_signed(low * factor)} to {_signed(high * factor)})"
    )


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{digits(abs(value))}"


def _of_cell(cell: CellHistory, before: Span, after: Span) -> Change:
    kind: Literal["worse", "better", "other"] = (
        "other" if before.end.wrong == after.end.wrong else "worse" if after.end.wrong else "better"
    )
    details = tuple(part for part in (after.message, after.reproduce) if part) if after.end.wrong else ()
    return Change(
        kind,
        cell.subject,
        cell.cell,
        f"{before.end} → {after.end}",
        after.runs[0],
        before.runs[-1],
        anchor(cell.cell),
        details,
    )


def _of_figure(figure: FigureHistory, change: FigureChange) -> Change:
    assert change.unit in (RATIO.unit, POINTS.unit, "")
    rank = "" if figure.rank is None else f" of rank {figure.rank}"
    kind: Literal["worse", "better", "other"] = (
        "other" if change.worse is None else "worse" if change.worse else "better"
    )
    return Change(
        kind,
        figure.subject,
        f"{figure.cell}: {figure.metric.replace('_', ' ')}{rank}",
        in_words(change),
        figure.points[change.place][0],
        figure.points[change.place - 1][0],
        anchor(figure.cell, figure.metric, *([] if figure.rank is None else [figure.rank])),
    )


def counts(changes: Sequence[Change]) -> dict[str, int]:
    """Return how many changes there are of each kind."""
    return {kind: sum(change.kind == kind for change in changes) for kind in ("worse", "better", "other")}
