"""The whole of a comparison: two runs, or the cells of one, aligned, weighed, and what must be said beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from harness.report.comparison.align import Alignment, between, within
from harness.report.comparison.changes import Kind, Verdict
from harness.report.comparison.comparable import Difference, machines_differ, software_differs
from harness.report.comparison.figures import FigureChange, weigh
from harness.report.comparison.outcomes import OutcomeChange, changes, is_answered
from harness.report.comparison.scale import LEAST_EFFECT
from harness.report.text import compact
from harness.results.run import Run

IN_TURNS: Final = "in_turns"
"""The option in a run's header that says with what it was measured in turns: equal words, equal rounds."""


@dataclass(frozen=True)
class Comparison:
    """What changed from A to B, both lists worst first.

    ``runs`` are the ids of two runs, or of the one whose cells that differ in ``by`` are compared. ``turns``: the
    launches of both sides alternated. ``as_before``: how many cells end as they did. ``machine`` makes figures
    incomparable, ``software`` does not. ``incomplete`` says which run is not whole, in sentences.
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

    def kinds(self) -> Counter[Kind]:
        """Return how many cells changed how."""
        return Counter(change.kind for change in self.outcomes)

    def verdicts(self) -> Counter[Verdict]:
        """Return how many figures have which verdict."""
        return Counter(change.verdict for change in self.figures)


def compare_runs(a: Run, b: Run, effect: float = LEAST_EFFECT) -> Comparison:
    """Hold run B against run A.

    Raises:
        NotAligned: it cannot be told what is to be compared with what.
    """
    token = a.header.options.get(IN_TURNS)
    return _comparison(
        between(a, b),
        (a, b),
        turns=token is not None and token == b.header.options.get(IN_TURNS),
        effect=effect,
        machine=machines_differ(a.header, b.header),
        software=software_differs(a.header, b.header),
    )


def compare_within(run: Run, by: str, effect: float = LEAST_EFFECT) -> Comparison:
    """Hold the cells of a run that differ in ``by`` alone against the first of them.

    Raises:
        NotAligned: no two cells do.
    """
    turns = run.header.options.get(IN_TURNS) is not None
    return _comparison(within(run, by), (run,), by=by, turns=turns, effect=effect)


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
    outcomes = changes(pairs)
    changed = {(change.cell, change.versus) for change in outcomes}
    answered = [pair for pair in pairs if is_answered(pair.a) and is_answered(pair.b)]
    figures = weigh(pairs, turns=turns, effect=effect, comparable=not machine)
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
            reasons.append("has no footer (it ended before its time, or is still going on)")
        if run.torn:
            reasons.append("has a last record that was cut off")
        if run.missing:
            reasons.append(f"has no answer for {len(run.missing)} of {len(run.header.planned)} cells")
        if reasons:
            yield f"Run {run.header.run_id} {' and '.join(reasons)}."


def _notes(runs: tuple[Run, ...], figures: tuple[FigureChange, ...], *, turns: bool, effect: float) -> Iterable[str]:
    if not figures:
        return
    if turns:
        yield "A and B were launched in turns: each round is a pair, and drift of the machine is in both."
    else:
        yield (
            "A and B were launched apart: drift of the machine between them is in no sample. So a change counts only "
            f"if its interval lies wholly beyond ±{compact(100 * effect)} %; --interleave measures both in turns."
        )
    if any(run.header.simulated for run in runs):
        yield "Devices are simulated: the figures are those of this CPU, and say nothing of GPUs."
