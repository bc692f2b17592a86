"""Every figure of a run in long form: one row a metric, with its unit."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.report.cells import CELL_COLUMNS, cell_table
from harness.store.run import Run

METRIC_COLUMNS: Final = ("run", *CELL_COLUMNS[:8], "check", "metric", "value", "unit")


def metrics_table(run: Run) -> pd.DataFrame:
    """Return one row a metric; columns are ``METRIC_COLUMNS``.

    ``error_x_noise`` stands once a cell and check (its largest, whatever the outcome), ``seconds`` (wall time
    of the launch) once a cell, with an empty check. What was not measured has no row.
    """
    cell = list(CELL_COLUMNS[:8])
    results: pd.DataFrame = pd.DataFrame(
        [(result.cell, *result.coordinates, result.check, result.error_x_noise) for result in run.results],
        columns=[*cell, "check", "value"],
    )
    results["value"] = results["value"].astype(float)
    errors = results.dropna(subset="value").groupby([*cell, "check"], sort=False, as_index=False).max()
    seconds = cell_table(run).dropna(subset="seconds").rename(columns={"seconds": "value"})
    table: pd.DataFrame = pd.concat(
        [
            errors.assign(metric="error_x_noise", unit="× noise"),
            seconds.assign(metric="seconds", unit="s", check=""),
        ]
    )
    table.insert(0, "run", run.header.run_id)
    ordered: pd.DataFrame = table.reindex(columns=list(METRIC_COLUMNS)).reset_index(drop=True)
    return ordered
