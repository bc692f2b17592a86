"""Writes a run's tables beside its ``results.jsonl``."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from harness.report.html.page import report_page
from harness.report.markdown.one_screen import one_screen
from harness.report.markdown.support import support_page
from harness.report.tables.metrics import metrics_table
from harness.report.tables.support import support_table
from harness.report.text import printable
from harness.results.atomic import write_text
from harness.results.run import read_run


def write_report(run_path: Path) -> pd.DataFrame:
    """Write ``report.html`` and ``.md``, ``support.md`` and ``.csv``, and ``metrics.csv``; return the support table.

    In the CSV files an infinite number is ``inf`` and a missing one is empty.

    Raises:
        ResultsError: the run cannot be read (see ``read_run``), or its folder not be written to.

    """
    run = read_run(run_path)
    table = support_table(run)
    write_text(run.path / "report.html", report_page(run))
    write_text(run.path / "report.md", one_screen(run))
    write_text(run.path / "support.md", support_page(run, table))
    write_text(run.path / "support.csv", as_csv(table))
    write_text(run.path / "metrics.csv", as_csv(metrics_table(run)))
    return table


def as_csv(table: pd.DataFrame) -> str:
    """Return a table as CSV whose texts are printable."""
    text: str = table.map(lambda value: printable(value) if isinstance(value, str) else value).to_csv(index=False)
    return text
