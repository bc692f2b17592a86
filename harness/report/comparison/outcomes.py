"""What changed in how cells end: newly failing, lost, fixed, new; and which of it is for the worse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from harness.core.outcome import Outcome
from harness.report.comparison.align import Evidence, Pair
from harness.report.comparison.changes import Kind
from harness.results.records import KNOWN, ending

ABSENT: Final = "not there"
MISSING: Final = "missing"
MEASURED: Final = "measured"


class Level(IntEnum):
    """How far an answer is from that of one device."""

    PASSED = 0
    DEVIATES = 1
    KNOWN = 2
    BAD = 3


@dataclass(frozen=True)
class State:
    """How a cell ended, in a word. ``level`` is None where there is no answer; ``wrong`` are its bad checks."""

    word: str
    level: Level | None
    wrong: frozenset[str] = frozenset()

    @property
    def said(self) -> str:
        """The word, and what was wrong."""
        return f"{self.word} ({', '.join(sorted(self.wrong))})" if self.wrong else self.word


@dataclass(frozen=True)
class OutcomeChange:
    """A cell that ends otherwise than it did. ``worse``: somebody should look at it."""

    kind: Kind
    worse: bool
    cell: str
    versus: str
    was: str
    now: str


def state(evidence: Evidence | None) -> State:
    """Return how a cell ended. One that was being written when its run broke off is missing, unless bad already.

    One that has figures is measured, also if it was skipped for their being unclear: that is for them to say.
    """
    if evidence is None:
        return State(ABSENT, None)
    end = ending(evidence.results) if evidence.results else None
    level = None if end is None else _level(end)
    if evidence.measurements and end in (None, Outcome.PASSED, Outcome.SKIPPED):
        return State(MEASURED, Level.PASSED)
    if end is None or (evidence.cut_short and level is not Level.BAD):
        return State(MISSING, None)
    word = str(getattr(end, "value", end)).replace("_", " ")
    wrong = frozenset(result.check for result in evidence.results if result.outcome.is_bad and not result.is_known)
    return State(word, level, wrong)


def is_answered(evidence: Evidence | None) -> bool:
    """Say whether a cell was tried, and came to an end."""
    return state(evidence).level is not None


def _level(end: Outcome | str) -> Level | None:
    if not isinstance(end, Outcome):
        return Level.KNOWN if end == KNOWN else Level.BAD
    if end.is_bad:
        return Level.BAD
    return {Outcome.PASSED: Level.PASSED, Outcome.DEVIATES: Level.DEVIATES}.get(end)


def changes(pairs: Iterable[Pair]) -> tuple[OutcomeChange, ...]:
    """Return every cell that ends otherwise in B than in A, or is measured less, the worst first."""
    found = [change for pair in pairs for change in (_ends(pair), _measured_less(pair)) if change]
    order = list(Kind)
    return tuple(sorted(found, key=lambda change: (order.index(change.kind), not change.worse)))


def _ends(pair: Pair) -> OutcomeChange | None:
    was, now = state(pair.a), state(pair.b)
    kind = _kind(was, now)
    if kind is None:
        return None
    worse = kind in (Kind.NEWLY_FAILING, Kind.LOST) or (
        kind is Kind.CHANGED and (_further(was, now) or bool(now.wrong - was.wrong))
    )
    return OutcomeChange(kind, worse, pair.cell, pair.versus, was.said, now.said)


def _measured_less(pair: Pair) -> OutcomeChange | None:
    """Return the metrics that a cell has lost. Within a run, one backend has figures that another cannot have."""
    if pair.a is None or pair.b is None or pair.versus or state(pair.b).level in (None, Level.BAD):
        return None
    left = {figure.metric for figure in pair.b.measurements}
    gone = dict.fromkeys(figure.metric for figure in pair.a.measurements if figure.metric not in left)
    was = f"{MEASURED} {', '.join(gone)}"
    return OutcomeChange(Kind.LOST, True, pair.cell, pair.versus, was, "not measured") if gone else None


def _kind(was: State, now: State) -> Kind | None:
    if was.level is None and now.level is None:
        return None
    if now.level is None:
        return Kind.LOST
    if now.level is Level.BAD and was.level is not Level.BAD:
        return Kind.NEWLY_FAILING
    if was.level is None:
        return Kind.NEW
    if was.level >= Level.KNOWN and now.level < Level.KNOWN:
        return Kind.FIXED
    if was.level is now.level is Level.PASSED:
        return None  # whether it was examined or measured
    return None if (was.word, was.wrong) == (now.word, now.wrong) else Kind.CHANGED


def _further(was: State, now: State) -> bool:
    return was.level is not None and now.level is not None and now.level > was.level
