"""The verdict on a run in one sentence: what stands first wherever a run is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from harness.core.outcome import Outcome
from harness.report.tables.cells import DECLINED, MISSING, measured_only
from harness.report.tables.failures import Group, failures, is_wrong
from harness.report.tables.summary import outcome_counts
from harness.results.records import KNOWN, UNEXPECTED_PASS
from harness.results.run import Run

_BAD = {
    Outcome.FAILED.value: "failed",
    Outcome.CRASHED.value: "crashed",
    Outcome.TIMED_OUT.value: "ran out of time",
    Outcome.ERRORED.value: "ended without a verdict",
    UNEXPECTED_PASS: "should have failed and did not",
}


@dataclass(frozen=True)
class Verdict:
    """``kind`` is how to take it; ``unclear``: nothing went wrong, but something has no answer.

    ``sentence`` is the verdict, ``detail`` a second sentence beside it, which may be empty.
    """

    kind: Literal["good", "bad", "unclear"]
    sentence: str
    detail: str = ""


def verdict_of(run: Run, cells: pd.DataFrame) -> Verdict:
    """Return the verdict on a run, given its cell table. What was declared unsupported does not count."""
    counts = outcome_counts(cells["outcome"])
    tried = len(cells) - sum(counts.get(name, 0) for name in DECLINED)
    measured, unmeasured = _measuring(run)
    bad = {words: counts[name] for name, words in _BAD.items() if name in counts}
    if bad or unmeasured:
        wrong = [_what_went_wrong(bad, tried)] if bad else []
        wrong += [f"Measuring {unmeasured} of {_cells(measured)} went wrong."] if unmeasured else []
        return Verdict("bad", " ".join(wrong), _most_of_it(failures(run), sum(bad.values()) + unmeasured))
    if not tried:
        return Verdict(
            "unclear", f"{_cells(measured)} measured, none examined." if measured else "Nothing was examined."
        )
    if missing := counts.get(MISSING, 0):
        answer = "has no answer" if missing == 1 else "have no answer"
        return Verdict("unclear", f"{missing} of {_cells(tried)} {answer}.", "In the others nothing went wrong.")
    if run.incomplete:
        return Verdict("unclear", "The run did not come to its end.", _how_cells_ended(counts))
    if KNOWN in counts:
        return Verdict("good", f"Nothing unexpected happened in {_cells(tried)}.", _how_cells_ended(counts))
    return Verdict("good", f"Nothing went wrong in {_cells(tried)}.", _how_cells_ended(counts))


def _measuring(run: Run) -> tuple[int, int]:
    """Return how many cells were to be timed and declared to be possible, and in how many that went wrong."""
    cells = measured_only(run)
    wrong = {result.coordinates for result in run.results if result.coordinates in cells and is_wrong(result)}
    declined = {one.coordinates for one in run.results if one.outcome is Outcome.UNSUPPORTED}
    return len(cells - declined), len(wrong)


def _what_went_wrong(bad: Mapping[str, int], tried: int) -> str:
    if len(bad) == 1:
        (words, count), *_ = bad.items()
        return f"{count} of {_cells(tried)} {words}."
    each = ", ".join(f"{count} {words}" for words, count in bad.items())
    return f"{sum(bad.values())} of {_cells(tried)} went wrong: {each}."


def _most_of_it(groups: Sequence[Group], bad: int) -> str:
    """Say what most cells went wrong by, where it has a name."""
    if not groups or groups[0].family is None:
        return ""
    count = len(groups[0].findings)
    share = "All of them" if count == bad else f"{count} of them"
    return f"{share}: {groups[0].title} ({groups[0].family})." if count > 1 else ""


def _how_cells_ended(counts: Mapping[str, int]) -> str:
    ways = {
        Outcome.PASSED.value: "computed what one device computes",
        Outcome.DEVIATES.value: "exactly what their backend promises",
        KNOWN: "failed as is known",
    }
    found = [f"{counts[name]} {words}" for name, words in ways.items() if name in counts]
    return f"{', '.join(found)}." if found else ""


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"
