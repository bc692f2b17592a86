"""How each cell ended in run after run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from plumbline.core.finding import UNEXPLAINED, in_reading_order, is_unexplained
from plumbline.core.outcome import Outcome
from plumbline.report.tables.failures import is_wrong
from plumbline.report.text import shortened
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Coordinates, Result, ending
from plumbline.results.run import Run

NOT_TRAINED: Final = (Outcome.UNSUPPORTED.value, Outcome.SKIPPED.value)
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
    return history.now.end.outcome not in NOT_TRAINED


def _end(results: Sequence[Result]) -> CellEnd:
    end = ending(results)
    outcome = end.value if isinstance(end, Outcome) else end
    first = next((result for result in results if is_wrong(result)), None)
    if first is None and outcome == KNOWN:
        first = next(result for result in results if result.is_known)
    cause = None if first is None or is_unexplained(first) else first.cause
    return CellEnd(outcome, cause, outcome == UNEXPECTED_PASS or outcome in _BAD)


_BAD = {outcome.value for outcome in Outcome if outcome.is_bad}
