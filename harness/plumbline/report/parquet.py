"""A run's metrics as Parquet: the same table as ``metrics.csv``, with types."""

from __future__ import annotations

from plumbline.core.errors import PlumblineError
from plumbline.report.formats import ReportFormat
from plumbline.report.tables.measured import metrics_table
from plumbline.results.run import Run


class NoParquet(PlumblineError):  # noqa: N818 - named after what is missing
    """No library for Parquet is installed."""


def metrics_parquet(run: Run) -> bytes:
    """Return one row a metric.

    Raises:
        NoParquet: pyarrow is not installed.
    """
    try:
        content: bytes = metrics_table(run).to_parquet(index=False)
    except ImportError as error:
        raise NoParquet("--format parquet needs pyarrow: run pip install pyarrow, or use --format csv") from error
    return content


FORMAT = ReportFormat("the same table as csv, with types", metrics_parquet, binary=True)
