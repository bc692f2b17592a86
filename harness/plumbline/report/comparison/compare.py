"""A whole comparison, of two runs or of the cells of one run; and what a CI job may fail on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from plumbline.report.comparison.alignment import (
    Alignment,
    Difference,
    align_runs,
    align_within,
    machines_differ,
    software_differs,
)
from plumbline.report.comparison.figure_changes import FigureChange, FigureVerdict, figure_changes
from plumbline.report.comparison.outcomes import OutcomeChange, OutcomeKind, is_answered, outcome_changes
from plumbline.report.comparison.significance import MINIMUM_EFFECT
from plumbline.report.tables.run_summary import NOT_ABOUT_GPUS
from plumbline.report.text import compact
from plumbline.results.run import Run

IN_TURNS: Final = "in_turns"
"""The option in a run's header that two interleaved runs share: an equal value means that their rounds are pairs."""


@dataclass(frozen=True)
class Comparison:
    """What changed from A to B; ``outcomes`` and ``figures`` are sorted worst first.

    ``runs`` are the ids of two runs, or of the one whose cells that differ in ``by`` are compared. ``turns``: the
    launches of both sides alternated. ``as_before``: the number of cells with the same outcome. Differences of
    ``machine`` make figures incomparable, those of ``software`` do not. ``incomplete`` has a sentence for each
    incomplete run.
    """

    runs: tuple[str, ...]
    by: str | None
    turns: bool
    effect: float
    as_before: int
    outcomes: tuple[OutcomeChange, ...]
    figures: tuple[FigureChange, ...]
    machine: tuple[Difference, ...] = ()
    software: tuple[Difference, ...] = ()
    incomplete: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def kinds(self) -> Counter[OutcomeKind]:
        return Counter(change.kind for change in self.outcomes)

    def verdicts(self) -> Counter[FigureVerdict]:
        return Counter(change.verdict for change in self.figures)


def compare_runs(a: Run, b: Run, effect: float = MINIMUM_EFFECT) -> Comparison:
    """Compare run B with run A.

    Raises:
        UsageError: no cell of one run corresponds to a cell of the other.
    """
    token = a.header.options.get(IN_TURNS)
    return _comparison(
        align_runs(a, b),
        (a, b),
        turns=token is not None and token == b.header.options.get(IN_TURNS),
        effect=effect,
        machine=machines_differ(a.header, b.header),
        software=software_differs(a.header, b.header),
    )


def compare_within(run: Run, by: str, effect: float = MINIMUM_EFFECT) -> Comparison:
    """Compare cells of a run that differ only in ``by`` with the first of them.

    Raises:
        UsageError: no two cells differ only in that.
    """
    turns = run.header.options.get(IN_TURNS) is not None
    return _comparison(align_within(run, by), (run,), by=by, turns=turns, effect=effect)


def _comparison(
    aligned: Alignment,
    runs: tuple[Run, ...],
    *,
    turns: bool,
    effect: float,
    by: str | None = None,
    machine: tuple[Difference, ...] = (),
    software: tuple[Difference, ...] = (),
) -> Comparison:
    pairs = aligned.pairs
    outcomes = outcome_changes(pairs)
    changed = {(change.cell, change.versus) for change in outcomes}
    answered = [pair for pair in pairs if is_answered(pair.a) and is_answered(pair.b)]
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
            f"only if its interval lies wholly beyond ±{compact(100 * effect)} %; --interleave avoids this."
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
"""The first that catches something sets the exit code. 2 and 4 are those of ``plumbline.core.errors``."""

DEFAULT_GATES: Final = ("outcome", "regression", "incomplete")


def failing_gates(comparison: Comparison, gates: Collection[str]) -> list[str]:
    return [name for name, gate in GATES.items() if name in gates and gate.catches(comparison)]
