"""What the wrong cells of one subject have in common: one cause that most of them name, and what it leaves over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core.finding import in_reading_order, is_unexplained
from harness.report.tables.failures import is_wrong, what_it_says
from harness.report.text import shortened
from harness.results.records import Result
from harness.results.run import Run

LONGEST_MESSAGE = 200
MOST_CELLS = 3

Cause = tuple[str, str | None]
"""A cause and its family."""


@dataclass(frozen=True)
class SubjectCauses:
    """The wrong cells of one subject. ``cause`` is the one that most of them name, None where there is none.

    ``example`` is its finding in the first such cell, ``explained`` are the cells that name it, ``others`` those that
    do not. ``contradicting`` are those of ``others`` in which it would have to show, and where the same check names
    another cause: the same problem, backend and precision on other devices.
    """

    subject: str
    wrong: int
    cause: Cause | None
    example: Result | None
    explained: tuple[str, ...]
    others: tuple[str, ...]
    contradicting: tuple[tuple[str, str], ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The summary in words, its first sentence first."""
        if self.cause is None or self.example is None:
            return (f"{self.subject}: no cause explains most of its {self.wrong} wrong cells.",)
        name, family = self.cause
        named = f"{name} ({family})" if family else name
        who = f"all {self.wrong}" if not self.others else f"{len(self.explained)} of {self.wrong}"
        message = shortened(what_it_says(self.example).partition("\n")[0], LONGEST_MESSAGE)
        said = [f"{self.subject}: {who} wrong cells have one cause, {named}: {message}"]
        if self.others:
            said.append(f"Not explained by it: {_counted(self.others)}.")
        if self.contradicting:
            cells = _listed([f"{cell} ({cause})" for cell, cause in self.contradicting])
            said.append(
                f"It would have to show in {cells} too, where another cause was named: "
                "either name alone may be wrong, or there are several mistakes."
            )
        return tuple(said)


def subject_causes(run: Run) -> list[SubjectCauses]:
    """Return the summary of each subject with several wrong cells, in the order of the run."""
    wrong: dict[str, dict[str, list[Result]]] = {}
    for result in run.results:
        if is_wrong(result):
            wrong.setdefault(result.subject, {}).setdefault(result.cell, []).append(result)
    return [_summary(subject, cells) for subject, cells in wrong.items() if len(cells) > 1]


def _summary(subject: str, cells: Mapping[str, Sequence[Result]]) -> SubjectCauses:
    first = {cell: in_reading_order(results)[0] for cell, results in cells.items()}
    roots = {cell: _named(results) for cell, results in cells.items()}
    counts = Counter(_cause(result) for result in first.values() if not is_unexplained(result))
    cause, count = counts.most_common(1)[0] if counts else (None, 0)
    if cause is None or count < 2 or 2 * count < len(cells):
        return SubjectCauses(subject, len(cells), None, None, (), tuple(cells), ())
    explained = tuple(cell for cell in cells if cause in roots[cell])
    others = tuple(cell for cell in cells if cause not in roots[cell])
    example = next(result for result in first.values() if _cause(result) == cause)
    shows = {_problem(first[cell]) for cell in explained if _cause(first[cell]) == cause}
    contradicting = tuple(
        (cell, str(first[cell].cause))
        for cell in others
        if _problem(first[cell]) in shows and not is_unexplained(first[cell])
    )
    return SubjectCauses(subject, len(cells), cause, example, explained, others, contradicting)


def _named(results: Sequence[Result]) -> set[Cause]:
    return {_cause(one) for one in results if one.consequence_of is None and not is_unexplained(one)}


def _cause(result: Result) -> Cause:
    return str(result.cause), result.family


def _problem(result: Result) -> tuple[str, ...]:
    """Return what two cells have in common in which one mistake shows in one way: all but the number of devices."""
    return result.check, result.workload, result.backend, result.precision, result.accelerator


def _counted(cells: Sequence[str]) -> str:
    return f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}: {_listed(cells)}"


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST_CELLS} more" if len(words) > MOST_CELLS else ""
    return ", ".join(words[:MOST_CELLS]) + more
