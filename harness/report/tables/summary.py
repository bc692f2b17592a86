"""What must be said beside every table: how cells ended, on what devices, and whether the run is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pandas as pd

from harness.core.outcome import Outcome
from harness.report.tables.cells import MISSING
from harness.report.text import printable
from harness.results.records import KNOWN, UNEXPECTED_PASS, CellRecord, Result
from harness.results.run import Run

SIMULATED = "simulated"


def outcome_counts(outcomes: Iterable[str]) -> dict[str, int]:
    """Return how many cells ended how, in the order of reading, without outcomes that no cell has."""
    found = Counter(outcomes)
    mild = (Outcome.UNSUPPORTED, Outcome.SKIPPED)  # nothing was tried: of less interest than what was
    good = (Outcome.PASSED, Outcome.DEVIATES)
    bad = [outcome for outcome in Outcome if outcome.is_bad]
    names = [*_values(good), KNOWN, UNEXPECTED_PASS, *_values(bad), *_values(mild), MISSING]
    return {name: found[name] for name in names if name in found}


def _values(outcomes: Iterable[Outcome]) -> list[str]:
    return [outcome.value for outcome in outcomes]


def counts_in_words(outcomes: Iterable[str]) -> str:
    """Return for example ``60 cells: 57 passed, 2 deviates, 1 failed``."""
    counts = outcome_counts(outcomes)
    words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    total = sum(counts.values())
    return f"{total} {'cell' if total == 1 else 'cells'}: {words}" if words else "0 cells"


def devices(run: Run, accelerator: str) -> str:
    """Return what computed cells of this accelerator: ``simulated``, or the device's name."""
    if run.header.simulated or accelerator == "cpu":
        return SIMULATED
    return printable(run.header.fingerprint.key.device or accelerator)


def computed_by(run: Run) -> list[str]:
    """Return what computed any of the run's cells, each once."""
    records: tuple[CellRecord, ...] = (*run.header.planned, *run.results, *run.measurements)
    return list(dict.fromkeys(devices(run, record.accelerator) for record in records))


def notes(run: Run) -> list[str]:
    """Return what is to be known beside the verdicts, a sentence for all cells of a subject that have the same note.

    A launch that went well has no finding; one that passed with a finding has something to say.
    """
    told: dict[tuple[str, str], list[Result]] = {}
    for result in run.results:
        if result.check == "launch" and result.outcome is Outcome.PASSED:
            first = result.message.partition(". ")[0].partition("\n")[0]
            told.setdefault((result.subject, first), []).append(result)
    return [
        f"note on {len(found)} {'cell' if len(found) == 1 else 'cells'} of {printable(subject)}, "
        f"as {found[0].cell}: {printable(found[0].message.partition(chr(10))[0])}"
        for (subject, _), found in told.items()
    ]


def what_is_missing(run: Run, cells: pd.DataFrame) -> str | None:
    """Return why the run, with these cells, is incomplete, in a sentence; None for a whole run."""
    if not run.incomplete:
        return None
    reasons = []
    if run.footer is None:
        reasons.append("the run has no footer, so it ended before its time or is still going on")
    if run.torn:
        reasons.append("its last record was cut off")
    if missing := outcome_counts(cells["outcome"]).get(MISSING):
        reasons.append(f"{missing} of {len(cells)} cells have no whole answer")
    if unmeasured := sum(planned.measured for planned in run.missing):
        reasons.append(f"{unmeasured} cells that were to be measured have no figures")
    return f"INCOMPLETE: {'; '.join(reasons)}."
