"""How cells' outcomes changed: newly failing, lost, fixed, new; and which changes are for the worse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from plumbline.core.outcome import Outcome
from plumbline.report.comparison.alignment import CellPair, CellRecords
from plumbline.report.tables.cells import MISSING
from plumbline.results.records import KNOWN, ending

ABSENT: Final = "not in the run"
MEASURED: Final = "measured"


class OutcomeKind(str, Enum):
    """How the outcome of a cell changed, worst first.

    ``LOST``: A has an outcome, B has none. ``NEW``: B has one, A has none. ``CHANGED``: both have one, and no other
    kind applies, for example from passed to deviates.
    """

    NEWLY_FAILING = "newly failing"
    LOST = "lost coverage"
    CHANGED = "changed"
    FIXED = "fixed"
    NEW = "new"


class Level(IntEnum):
    """How far an outcome is from that of one device."""

    PASSED = 0
    DEVIATES = 1
    KNOWN = 2
    BAD = 3


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended, in one word. ``level`` is None without an outcome; ``wrong`` are its bad checks."""

    word: str
    level: Level | None
    wrong: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return f"{self.word} ({', '.join(sorted(self.wrong))})" if self.wrong else self.word


@dataclass(frozen=True)
class OutcomeChange:
    """A cell with another outcome in B than in A. ``worse``: it needs attention."""

    kind: OutcomeKind
    worse: bool
    cell: str
    versus: str
    was: str
    now: str


def cell_end(cell: CellRecords | None) -> CellEnd:
    """Return how a cell ended. A cell that was being written when its run broke off is missing, unless it is bad.

    A cell with figures is measured, even if it was skipped because they are unstable: the figures show that.
    """
    if cell is None:
        return CellEnd(ABSENT, None)
    end = ending(cell.results) if cell.results else None
    level = None if end is None else _level(end)
    if cell.measurements and end in (None, Outcome.PASSED, Outcome.SKIPPED):
        return CellEnd(MEASURED, Level.PASSED)
    if end is None or (cell.cut_short and level is not Level.BAD):
        return CellEnd(MISSING, None)
    word = str(getattr(end, "value", end)).replace("_", " ")
    wrong = frozenset(result.check for result in cell.results if result.outcome.is_bad and not result.is_known)
    return CellEnd(word, level, wrong)


def is_answered(cell: CellRecords | None) -> bool:
    return cell_end(cell).level is not None


def _level(end: Outcome | str) -> Level | None:
    if not isinstance(end, Outcome):
        return Level.KNOWN if end == KNOWN else Level.BAD
    if end.is_bad:
        return Level.BAD
    return {Outcome.PASSED: Level.PASSED, Outcome.DEVIATES: Level.DEVIATES}.get(end)


def outcome_changes(pairs: Iterable[CellPair]) -> tuple[OutcomeChange, ...]:
    """Return every cell with another outcome in B than in A, or with fewer metrics, the worst first."""
    found = [change for pair in pairs for change in (_ends(pair), _measured_less(pair)) if change]
    order = list(OutcomeKind)
    return tuple(sorted(found, key=lambda change: (order.index(change.kind), not change.worse)))


def _ends(pair: CellPair) -> OutcomeChange | None:
    was, now = cell_end(pair.a), cell_end(pair.b)
    kind = _kind(was, now)
    if kind is None:
        return None
    worse = kind in (OutcomeKind.NEWLY_FAILING, OutcomeKind.LOST) or (
        kind is OutcomeKind.CHANGED and (_further(was, now) or bool(now.wrong - was.wrong))
    )
    return OutcomeChange(kind, worse, pair.cell, pair.versus, was.text, now.text)


def _measured_less(pair: CellPair) -> OutcomeChange | None:
    """Return the metrics that a cell has lost; None within a run, where backends have different metrics."""
    if pair.a is None or pair.b is None or pair.versus or cell_end(pair.b).level in (None, Level.BAD):
        return None
    left = {figure.metric for figure in pair.b.measurements}
    gone = dict.fromkeys(figure.metric for figure in pair.a.measurements if figure.metric not in left)
    was = f"{MEASURED} {', '.join(gone)}"
    return OutcomeChange(OutcomeKind.LOST, True, pair.cell, pair.versus, was, "not measured") if gone else None


def _kind(was: CellEnd, now: CellEnd) -> OutcomeKind | None:
    if was.level is None and now.level is None:
        return None
    if now.level is None:
        return OutcomeKind.LOST
    if now.level is Level.BAD and was.level is not Level.BAD:
        return OutcomeKind.NEWLY_FAILING
    if was.level is None:
        return OutcomeKind.NEW
    if was.level >= Level.KNOWN and now.level < Level.KNOWN:
        return OutcomeKind.FIXED
    if was.level is now.level is Level.PASSED:
        return None  # one run examined it, the other only measured it
    return None if (was.word, was.wrong) == (now.word, now.wrong) else OutcomeKind.CHANGED


def _further(was: CellEnd, now: CellEnd) -> bool:
    return was.level is not None and now.level is not None and now.level > was.level
