"""What must be said beside every table: how cells ended, on what devices, and whether the run is whole."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.core.outcome import Outcome
from harness.report.cells import MISSING
from harness.report.text import printable
from harness.store.records import KNOWN, UNEXPECTED_PASS
from harness.store.run import Run

SIMULATED = "simulated"


def outcome_counts(cells: pd.DataFrame) -> dict[str, int]:
    """Return how many cells ended how, in the order of reading, without outcomes that no cell has."""
    found = cells["outcome"].value_counts()
    mild = (Outcome.UNSUPPORTED, Outcome.SKIPPED)  # nothing was tried: of less interest than what was
    good = (Outcome.PASSED, Outcome.DEVIATES)
    bad = [outcome for outcome in Outcome if outcome.is_bad]
    names = [*_values(good), KNOWN, UNEXPECTED_PASS, *_values(bad), *_values(mild), MISSING]
    return {name: int(found[name]) for name in names if name in found}


def _values(outcomes: Iterable[Outcome]) -> list[str]:
    return [outcome.value for outcome in outcomes]


def counts_in_words(cells: pd.DataFrame) -> str:
    """Return for example ``60 cells: 57 passed, 2 deviates, 1 failed``."""
    counts = outcome_counts(cells)
    words = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    noun = "cell" if len(cells) == 1 else "cells"
    return f"{len(cells)} {noun}: {words}" if words else "0 cells"


def devices(run: Run, accelerator: str) -> str:
    """Return what computed cells of this accelerator: ``simulated``, or the device's name."""
    if run.header.simulated or accelerator == "cpu":
        return SIMULATED
    return printable(run.header.fingerprint.key.device or accelerator)


def what_is_missing(run: Run, cells: pd.DataFrame) -> str | None:
    """Return why the run, with these cells, is incomplete, in a sentence; None for a whole run."""
    if not run.incomplete:
        return None
    reasons = []
    if run.footer is None:
        reasons.append("the run has no footer, so it ended before its time or is still going on")
    if run.torn:
        reasons.append("its last record was cut off")
    if missing := outcome_counts(cells).get(MISSING):
        reasons.append(f"{missing} of {len(cells)} cells have no whole answer")
    return f"INCOMPLETE: {'; '.join(reasons)}."
