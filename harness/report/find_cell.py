"""Which cell of a run somebody means by a few words: one that went wrong, rather than others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from harness.core.errors import PlumblineError
from harness.core.outcome import Outcome
from harness.report.tables.cells import DECLINED, MISSING, cell_table
from harness.report.text import printable
from harness.results.records import KNOWN, Result, ending
from harness.results.run import Run

MOST_CANDIDATES: Final = 30
MEASURED: Final = "measured"

_AFTER_WRONG: Final = (MISSING, KNOWN, Outcome.DEVIATES.value, Outcome.PASSED.value, MEASURED, *DECLINED)
"""Outcomes of cells that did not go wrong, in the order in which candidates are listed."""


class NoSuchCell(PlumblineError):  # noqa: N818 - named after what is wrong
    """No cell of the run matches, or several do."""


def cell_called(name: str, outcomes: Mapping[str, str]) -> str:
    """Return the id that is ``name``, or the only one that has all of its words, or of several the only bad one.

    ``outcomes`` has how each cell of the run ended.

    Raises:
        NoSuchCell: none has, or several have; the message lists them, those that went wrong first.
    """
    if name in outcomes:
        return name
    found = matching(name, outcomes)
    wrong = [cell for cell in found if _rank(outcomes[cell]) == 0]
    for only in (found, wrong):
        if len(only) == 1:
            return only[0]
    if not found:
        raise NoSuchCell(
            f"no cell of this run has all words of {printable(name)!r} in its id, which is "
            "SUBJECT-WORKLOAD-BACKEND-NODESxGPUS-PRECISION, for example reference-mlp-ddp-1x2-32"
        )
    raise NoSuchCell(
        "\n".join([f"{len(found)} cells of this run match {printable(name)!r}:", *_listed(found, outcomes)])
    )


def matching(name: str, outcomes: Mapping[str, str]) -> list[str]:
    """Return the ids that have all words of ``name``."""
    return [cell for cell in outcomes if all(word in cell for word in name.split())]


def cell_outcomes(run: Run) -> dict[str, str]:
    """Return how each cell of a run ended, by its id: examined ones, then those that were measured."""
    cells = cell_table(run)
    outcomes = dict(zip(cells["cell"], cells["outcome"], strict=True))
    results: dict[str, list[Result]] = {}
    for result in run.results:
        if result.cell not in outcomes:
            results.setdefault(result.cell, []).append(result)
    measured = {record.cell: MEASURED for record in run.measurements if record.cell not in outcomes}
    for cell, found in results.items():
        end = ending(found)
        if end is not Outcome.PASSED:
            measured[cell] = str(getattr(end, "value", end))
    missing = {one.cell: MISSING for one in run.header.planned if one.cell not in outcomes | measured}
    return {**outcomes, **measured, **missing}


def _listed(found: list[str], outcomes: Mapping[str, str]) -> list[str]:
    tried = [cell for cell in found if outcomes[cell] != Outcome.UNSUPPORTED.value]
    listed = sorted(tried or found, key=lambda cell: _rank(outcomes[cell]))
    shown = {printable(cell): outcomes[cell].replace("_", " ") for cell in listed[:MOST_CANDIDATES]}
    width = max(map(len, shown))
    lines = [f"  {cell:{width}}  {outcome}" for cell, outcome in shown.items()]
    if len(listed) > len(shown):
        lines.append(f"  … and {len(listed) - len(shown)} more")
    if len(listed) < len(found):
        lines.append(f"  and {len(found) - len(listed)} that the subject does not declare")
    return lines


def _rank(outcome: str) -> int:
    """Return 0 for what went wrong, and more for what is of less interest."""
    return 1 + _AFTER_WRONG.index(outcome) if outcome in _AFTER_WRONG else 0
