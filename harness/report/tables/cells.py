"""A run's results as one table with a row a cell: what the other tables are made from."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.core.outcome import Outcome
from harness.report.tables.cache import once_for_a_run
from harness.results.records import PERFORMANCE, CellRecord, Coordinates, Result, ending
from harness.results.run import Run

MISSING: Final = "missing"
"""The outcome of a cell that was planned and has no answer. Not one of ``Outcome``: nothing ended so."""

DECLINED: Final = (Outcome.UNSUPPORTED.value, Outcome.SKIPPED.value)
"""The outcomes of cells that nobody meant to train."""

CELL_COLUMNS: Final = (
    "cell",
    "subject",
    "workload",
    "backend",
    "num_nodes",
    "gpus",
    "precision",
    "accelerator",
    "outcome",
    "has_failed",
    "error_x_noise",
    "seconds",
)

_MEASURED = (Outcome.PASSED, Outcome.DEVIATES, Outcome.FAILED)


@once_for_a_run
def cell_table(run: Run) -> pd.DataFrame:
    """Return one row a cell, planned cells first and in their order; columns are ``CELL_COLUMNS``.

    ``outcome``: the worst of the cell's findings; ``known`` or ``unexpected pass`` where findings were expected to be
    bad (see ``ending``); or ``missing``. A cell that was being written when the run broke off is missing too, unless
    it is bad already: the findings it lacks might not have passed. A cell that was measured and not examined has none.
    ``has_failed``: whether any finding failed that was not expected to, which a worse outcome (say, a check that
    crashed) would hide.
    ``error_x_noise``: the largest among findings that passed, deviate or failed; others measured nothing.
    ``seconds``: the wall time of the cell's launch. The last two are NaN where there is none.
    """
    findings: dict[Coordinates, list[Result]] = {}
    measured = measured_only(run)
    cells: dict[Coordinates, CellRecord] = {
        planned.coordinates: planned for planned in run.header.planned if planned.coordinates not in measured
    }
    for result in run.results:
        if result.coordinates in measured:
            continue
        cells.setdefault(result.coordinates, result)
        findings.setdefault(result.coordinates, []).append(result)
    rows = [
        (cell.cell, *key, *_ending(findings.get(key, []), cut_short=key == run.cut_short))
        for key, cell in cells.items()
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    # Said here, because pandas cannot tell from no rows, or from rows without a figure.
    for name, kind in {"has_failed": bool, "error_x_noise": float, "seconds": float}.items():
        table[name] = table[name].astype(kind)
    return table


def measured_only(run: Run) -> set[Coordinates]:
    """Return the cells that a run measures and does not examine: the plan says so, or all that was found does."""
    planned = {cell.coordinates for cell in run.header.planned if cell.measured}
    timed = {record.coordinates for record in run.measurements}
    timed |= {result.coordinates for result in run.results if result.check == PERFORMANCE}
    examined = {result.coordinates for result in run.results if result.check != PERFORMANCE}
    return planned | (timed - examined)


def _ending(findings: list[Result], *, cut_short: bool) -> tuple[str, bool, float | None, float | None]:
    if not findings:
        return MISSING, False, None, None
    end = ending(findings)
    is_bad = isinstance(end, Outcome) and end.is_bad
    return (
        MISSING if cut_short and not is_bad else str(getattr(end, "value", end)),
        any(finding.outcome is Outcome.FAILED and not finding.is_known for finding in findings),
        max((found for finding in findings if (found := _measured(finding)) is not None), default=None),
        max((finding.seconds for finding in findings if finding.seconds is not None), default=None),
    )


def _measured(finding: Result) -> float | None:
    return finding.error_x_noise if finding.outcome in _MEASURED else None
