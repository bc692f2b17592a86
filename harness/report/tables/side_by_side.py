"""Trainers side by side: a row for each way of training, a column for each subject."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.report.tables.cells import cell_table
from harness.report.tables.run_facts import backend_in_words
from harness.report.tables.support import configurations, mark, passed_of_tried, reading_order
from harness.results.run import Run

ROW_COLUMNS: Final = ("Backend", "Nodes × gpus", "Precision")


def side_by_side(run: Run, *, every: bool = False) -> pd.DataFrame | None:
    """Return a table with ``ROW_COLUMNS`` and a column for each subject, None where the run has only one.

    A square is the mark of ``support.MARKS`` for the subject's cells there, with ``passed/tried``; empty where the
    subject was not asked. Rows of which no subject declares a cell are left out, unless ``every`` is to be there.
    """
    cells = configurations(cell_table(run))
    subjects = list(dict.fromkeys(one.subject for one in cells))
    if len(subjects) < 2:
        return None
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in sorted(cells, key=reading_order):
        devices = "n×k" if one.several_nodes else "1×k" if one.several_devices else "1×1"
        row = rows.setdefault((backend_in_words(one.backend), devices, one.precision), {})
        row[one.subject] = _square(cells[one])
    table: pd.DataFrame = pd.DataFrame(
        [
            (*named, *(row.get(subject, "") for subject in subjects))
            for named, row in rows.items()
            if every or set(row.values()) != {"-"}
        ],
        columns=[*ROW_COLUMNS, *subjects],
    )
    return table


def _square(cells: pd.DataFrame) -> str:
    passed, tried = passed_of_tried(cells["outcome"])
    shown = mark(cells["outcome"], has_failed=bool(cells["has_failed"].any()))
    return f"{shown} {passed}/{tried}" if tried else shown
