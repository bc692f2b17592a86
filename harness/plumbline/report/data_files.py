"""A run's tables as CSV: every metric, and the support table."""

from __future__ import annotations

import pandas as pd

from plumbline.report.formats import ReportFormat
from plumbline.report.tables.measured import metrics_table
from plumbline.report.tables.support import support_table
from plumbline.report.text import printable
from plumbline.results.run import Run


def metrics_csv(run: Run) -> str:
    """Return one row a metric. An infinite number is ``inf``, a missing one is empty."""
    return _as_csv(metrics_table(run))


def support_csv(run: Run) -> str:
    return _as_csv(support_table(run))


def _as_csv(table: pd.DataFrame) -> str:
    text: str = table.map(lambda value: printable(value) if isinstance(value, str) else value).to_csv(index=False)
    return text


CSV = ReportFormat("every metric in long form", metrics_csv, {"metrics.csv": metrics_csv, "support.csv": support_csv})
