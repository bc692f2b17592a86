"""Everything that changed from one run to the next: cells that end differently, figures at another level."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from plumbline.report.comparison.significance import POINTS, RATIO
from plumbline.report.history.cell_history import CellHistory, Span
from plumbline.report.history.figure_history import FigureChange, FigureHistory
from plumbline.report.history.recorded_runs import differing, traits
from plumbline.report.text import digits
from plumbline.results.records import KNOWN, grouped
from plumbline.results.run import Run

Kind = Literal["worse", "better", "other"]
KINDS: Final[tuple[Kind, ...]] = ("worse", "better", "other")


@dataclass(frozen=True)
class Change:
    """What one or more cells, or one figure, did otherwise than in the run before.

    ``kind`` is ``worse`` where something went wrong or a figure lost, ``better`` where the opposite, else ``other``.
    ``places`` are the names of the rows on the page with their addresses, ``message`` and ``reproduce`` those of the
    first cell, empty where nothing is wrong now.
    """

    kind: Kind
    sentence: str
    places: tuple[tuple[str, str], ...]
    message: str = ""
    reproduce: str = ""


@dataclass(frozen=True)
class Step:
    """Everything that changed in one subject between two runs, what is worse first."""

    subject: str
    before: Run
    run: Run
    changes: tuple[Change, ...]

    @property
    def reasons(self) -> list[str]:
        return differing(traits(self.before, self.subject), traits(self.run, self.subject))


def all_steps(cells: Iterable[CellHistory], figures: Iterable[FigureHistory]) -> list[Step]:
    """Return every change, the newest step first; cells that did the same in a step are one change."""
    found = [
        (cell.subject, before.runs[-1], after.runs[0], _of_cell(cell, before, after))
        for cell in cells
        for before, after in pairwise(cell.spans)
    ]
    found += [
        (figure.subject, figure.points[change.place - 1][0], figure.points[change.place][0], _of_figure(figure, change))
        for figure in figures
        for change in figure.changes
    ]
    steps = grouped(found, lambda one: (one[0], one[1].header.run_id, one[2].header.run_id))
    every = [Step(*ones[0][:3], _together(change for *_, change in ones)) for ones in steps.values()]
    return sorted(every, key=lambda step: step.run.header.started, reverse=True)


def _together(changes: Iterable[Change]) -> tuple[Change, ...]:
    same: dict[tuple[Kind, str], Change] = {}
    for change in changes:
        first = same.setdefault((change.kind, change.sentence), change)
        if first is not change:
            same[change.kind, change.sentence] = replace(first, places=(*first.places, *change.places))
    return tuple(sorted(same.values(), key=lambda change: KINDS.index(change.kind)))


def anchor(*words: object) -> str:
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
    kind: Kind = "other" if before.end.wrong == after.end.wrong else "worse" if after.end.wrong else "better"
    sentence = f"{before.end} → {after.end}"
    if before.end.cause == after.end.cause is not None and KNOWN in (before.end.outcome, after.end.outcome):
        kind = "other"
        expected = "now expected" if after.end.outcome == KNOWN else "not expected any more"
        sentence = f"{after.end.cause} as before, {expected}"
    told = (after.message, after.reproduce) if after.end.wrong else ()
    return Change(kind, sentence, ((cell.cell, anchor(cell.cell)),), *told)


def _of_figure(figure: FigureHistory, change: FigureChange) -> Change:
    assert change.unit in (RATIO.unit, POINTS.unit, "")
    kind: Kind = "other" if change.worse is None else "worse" if change.worse else "better"
    rank = "" if figure.rank is None else f" of rank {figure.rank}"
    address = anchor(figure.cell, figure.metric, *([] if figure.rank is None else [figure.rank]))
    sentence = f"{figure.metric.replace('_', ' ')}{rank} {in_words(change)}"
    return Change(kind, sentence, ((figure.cell, address),))


def counts(steps: Iterable[Step]) -> dict[Kind, int]:
    every = [change for step in steps for change in step.changes]
    return {kind: sum(len(change.places) for change in every if change.kind == kind) for kind in KINDS}
