"""A whole comparison of two runs, or of the cells of one: outcomes, figures, and conditions that fail a CI job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from plumbline.core.outcome import Outcome
from plumbline.report.comparison import alignment
from plumbline.report.comparison.figure_changes import MINIMUM_EFFECT, FigureChange, FigureVerdict, figure_changes
from plumbline.report.tables.cells import MISSING
from plumbline.report.tables.run_summary import NOT_ABOUT_GPUS
from plumbline.results.records import KNOWN, ending
from plumbline.results.run import Run

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
    """How far a cell is from matching one device."""

    PASSED = 0
    DEVIATES = 1
    KNOWN = 2
    BAD = 3


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended, in one word. ``level`` is None if nothing was judged; ``wrong`` are its bad checks."""

    word: str
    level: Level | None
    wrong: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return f"{self.word} ({', '.join(sorted(self.wrong))})" if self.wrong else self.word


@dataclass(frozen=True)
class OutcomeChange:
    """A cell whose outcome differs between A and B. ``worse``: it needs attention."""

    kind: OutcomeKind
    worse: bool
    cell: str
    versus: str
    was: str
    now: str


def cell_end(cell: alignment.CellRecords | None) -> CellEnd:
    """Return how a cell ended: missing if its run broke off while writing it, measured if it has figures."""
    if cell is None:
        return CellEnd(ABSENT, None)
    end = ending(cell.results) if cell.results else None
    level: Level | None = Level.BAD
    if not isinstance(end, Outcome):
        level = None if end is None else Level.KNOWN if end == KNOWN else Level.BAD
    elif not end.is_bad:
        level = {Outcome.PASSED: Level.PASSED, Outcome.DEVIATES: Level.DEVIATES}.get(end)
    if cell.measurements and end in (None, Outcome.PASSED, Outcome.SKIPPED):
        return CellEnd(MEASURED, Level.PASSED)
    if end is None or (cell.cut_short and level is not Level.BAD):
        return CellEnd(MISSING, None)
    word = str(end).replace("_", " ")
    wrong = frozenset(result.check for result in cell.results if result.outcome.is_bad and not result.is_known)
    return CellEnd(word, level, wrong)


def outcome_changes(pairs: Iterable[alignment.CellPair]) -> tuple[OutcomeChange, ...]:
    """Return every cell whose outcome differs between A and B, or that has fewer metrics in B, worst first."""
    found = [change for pair in pairs for change in (_ends(pair), _measured_less(pair)) if change]
    return tuple(sorted(found, key=lambda change: (list(OutcomeKind).index(change.kind), not change.worse)))


def _ends(pair: alignment.CellPair) -> OutcomeChange | None:
    was, now = cell_end(pair.a), cell_end(pair.b)
    if now.level is None:
        kind = None if was.level is None else OutcomeKind.LOST
    elif now.level is Level.BAD and was.level is not Level.BAD:
        kind = OutcomeKind.NEWLY_FAILING
    elif was.level is None:
        kind = OutcomeKind.NEW
    elif was.level >= Level.KNOWN and now.level < Level.KNOWN:
        kind = OutcomeKind.FIXED
    elif was.level is now.level is Level.PASSED or (was.word, was.wrong) == (now.word, now.wrong):
        kind = None  # also where one run examined the cell, and the other only measured it
    else:
        kind = OutcomeKind.CHANGED
    if kind is None:
        return None
    further = (now.level or 0) > (was.level or 0) or bool(now.wrong - was.wrong)
    worse = kind in (OutcomeKind.NEWLY_FAILING, OutcomeKind.LOST) or (kind is OutcomeKind.CHANGED and further)
    return OutcomeChange(kind, worse, pair.cell, pair.versus, was.text, now.text)


def _measured_less(pair: alignment.CellPair) -> OutcomeChange | None:
    if pair.a is None or pair.b is None or pair.versus or cell_end(pair.b).level in (None, Level.BAD):
        return None
    left = {figure.metric for figure in pair.b.measurements}
    gone = dict.fromkeys(figure.metric for figure in pair.a.measurements if figure.metric not in left)
    was = f"{MEASURED} {', '.join(gone)}"
    return OutcomeChange(OutcomeKind.LOST, True, pair.cell, pair.versus, was, "not measured") if gone else None


IN_TURNS: Final = "in_turns"
"""The header option that interleaved runs share. If two runs have the same value, their rounds are pairs."""


@dataclass(frozen=True)
class Comparison:
    """What changed from A to B; ``outcomes`` and ``figures`` are sorted worst first.

    ``runs`` has the ids of two runs, or the id of the one run whose cells are compared by ``by``. ``turns``: the
    launches of both sides alternated. ``as_before``: the number of cells with the same outcome. Differences in
    ``machine`` make figures incomparable, differences in ``software`` do not. ``incomplete`` has a sentence for each
    incomplete run.
    """

    runs: tuple[str, ...]
    by: str | None
    turns: bool
    effect: float
    as_before: int
    outcomes: tuple[OutcomeChange, ...]
    figures: tuple[FigureChange, ...]
    machine: tuple[alignment.Difference, ...] = ()
    software: tuple[alignment.Difference, ...] = ()
    incomplete: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def kinds(self) -> Counter[OutcomeKind]:
        return Counter(change.kind for change in self.outcomes)

    def verdicts(self) -> Counter[FigureVerdict]:
        return Counter(change.verdict for change in self.figures)


def compare_runs(a: Run, b: Run, effect: float = MINIMUM_EFFECT) -> Comparison:
    """Compare run B with run A; raise ``UsageError`` if one has no cells, or they have no subject in common."""
    token = a.header.options.get(IN_TURNS)
    return _comparison(
        alignment.align_runs(a, b),
        (a, b),
        turns=token is not None and token == b.header.options.get(IN_TURNS),
        effect=effect,
        machine=alignment.machines_differ(a.header, b.header),
        software=alignment.software_differs(a.header, b.header),
    )


def compare_within(run: Run, by: str, effect: float = MINIMUM_EFFECT) -> Comparison:
    """Compare cells that differ only in ``by`` with the first of them; raise ``UsageError`` if there are none."""
    turns = run.header.options.get(IN_TURNS) is not None
    return _comparison(alignment.align_within(run, by), (run,), by=by, turns=turns, effect=effect)


def _comparison(
    aligned: alignment.Alignment,
    runs: tuple[Run, ...],
    *,
    turns: bool,
    effect: float,
    by: str | None = None,
    machine: tuple[alignment.Difference, ...] = (),
    software: tuple[alignment.Difference, ...] = (),
) -> Comparison:
    pairs = aligned.pairs
    outcomes = outcome_changes(pairs)
    changed = {(change.cell, change.versus) for change in outcomes}
    answered = [pair for pair in pairs if None not in (cell_end(pair.a).level, cell_end(pair.b).level)]
    figures = figure_changes(pairs, turns=turns, effect=effect, comparable=not machine)
    return Comparison(
        runs=tuple(run.header.run_id for run in runs),
        by=by,
        turns=turns,
        effect=effect,
        as_before=sum((pair.cell, pair.versus) not in changed for pair in answered),
        outcomes=outcomes,
        figures=figures,
        machine=machine,
        software=software,
        incomplete=tuple(_incomplete(runs)),
        notes=(*aligned.notes, *(() if machine else _notes(runs, figures, turns=turns, effect=effect))),
    )


def _incomplete(runs: Iterable[Run]) -> Iterable[str]:
    for run in runs:
        reasons = []
        if run.footer is None:
            reasons.append("has no footer (it stopped early, or is still running)")
        if run.torn:
            reasons.append("has a truncated last record")
        if run.missing:
            reasons.append(f"has no result for {len(run.missing)} of {len(run.header.planned)} cells")
        if reasons:
            yield f"Run {run.header.run_id} {' and '.join(reasons)}."


def _notes(runs: tuple[Run, ...], figures: tuple[FigureChange, ...], *, turns: bool, effect: float) -> Iterable[str]:
    if not figures:
        return
    if turns:
        yield "Launches of A and B were interleaved: each round is a pair, so drift of the machine affects both sides."
    else:
        yield (
            "A and B were measured at different times, and the machine may have drifted in between. So a change counts "
            f"only if its interval lies wholly beyond ±{100 * effect:.2g} %; --interleave avoids this."
        )
    if any(run.header.simulated for run in runs):
        yield NOT_ABOUT_GPUS


@dataclass(frozen=True)
class FailureGate:
    """A reason to end with exit code ``code``: ``description`` says what ``catches`` finds."""

    code: int
    description: str
    catches: Callable[[Comparison], bool]


GATES: Final[Mapping[str, FailureGate]] = {
    "outcome": FailureGate(
        1,
        "a cell has a worse outcome",
        lambda found: any(change.worse and change.kind is not OutcomeKind.LOST for change in found.outcomes),
    ),
    "regression": FailureGate(3, "a figure is worse", lambda found: found.verdicts()[FigureVerdict.WORSE] > 0),
    "incomplete": FailureGate(
        5,
        "a run is incomplete, or cells or figures of A are not in B",
        lambda found: bool(found.incomplete) or found.kinds()[OutcomeKind.LOST] > 0,
    ),
    "inconclusive": FailureGate(
        6,
        "a figure has no verdict, or is not comparable",
        lambda found: any(
            found.verdicts()[verdict] for verdict in (FigureVerdict.INCONCLUSIVE, FigureVerdict.NOT_COMPARABLE)
        ),
    ),
}
"""The first gate that catches something sets the exit code. ``plumbline.core.errors`` defines codes 2 and 4."""

DEFAULT_GATES: Final = ("outcome", "regression", "incomplete")


def failing_gates(comparison: Comparison, gates: Collection[str]) -> list[str]:
    return [name for name, gate in GATES.items() if name in gates and gate.catches(comparison)]
