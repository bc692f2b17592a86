"""Every figure of a run in long form: one row a metric, with its unit."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.report.tables.cells import CELL_COLUMNS, cell_table
from harness.report.tables.figures import conformance_of
from harness.results.run import Run

_CELL: Final = list(CELL_COLUMNS[:8])
_OF_A_MEASUREMENT: Final = ["metric", "value", "unit", "rank", "low", "high", "better", "refusal"]

METRIC_COLUMNS: Final = ("run", *_CELL, "check", *_OF_A_MEASUREMENT, "conformance")


def metrics_table(run: Run) -> pd.DataFrame:
    """Return one row a metric; columns are ``METRIC_COLUMNS``.

    ``error_x_noise`` stands once a cell and check (its largest, whatever the outcome), ``seconds`` (wall time
    of the launch) once a cell, with an empty check. What was not measured has no row.
    Then come the measurements: ``low`` and ``high`` bound a figure with 95 % confidence, ``rank`` is the one it speaks
    of, ``conformance`` the mark of its configuration in the same run. One that was refused has no value, and a reason.
    """
    results: pd.DataFrame = pd.DataFrame(
        [(result.cell, *result.coordinates, result.check, result.error_x_noise) for result in run.results],
        columns=[*_CELL, "check", "value"],
    )
    results["value"] = results["value"].astype(float)
    errors = results.dropna(subset="value").groupby([*_CELL, "check"], sort=False, as_index=False).max()
    seconds = cell_table(run).dropna(subset="seconds").rename(columns={"seconds": "value"})
    table: pd.DataFrame = pd.concat(
        [
            errors.assign(metric="error_x_noise", unit="× noise"),
            seconds.assign(metric="seconds", unit="s", check=""),
            _measurements(run),
        ]
    )
    table.insert(0, "run", run.header.run_id)
    ordered: pd.DataFrame = table.reindex(columns=list(METRIC_COLUMNS)).reset_index(drop=True)
    return ordered


def _measurements(run: Run) -> pd.DataFrame:
    found = conformance_of(run)
    rows = [
        (one.cell, *one.coordinates, *(getattr(one, name) for name in _OF_A_MEASUREMENT), found(one.coordinates).mark)
        for one in run.measurements
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[*_CELL, *_OF_A_MEASUREMENT, "conformance"])
    # A rank is a number or not there: in a column of floats it would read 0.0.
    whole: pd.DataFrame = table.astype({"rank": "Int64", "value": "float64", "low": "float64", "high": "float64"})
    whole.insert(0, "check", "")
    return whole
