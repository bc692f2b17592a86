"""Measures, and has the machine for itself meanwhile; ends with what trainers cost over a loop by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.resolve()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Show what the trainers cost over a loop by hand, beside each other."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    found = [
        dict(report.user_properties).get("plumbline") for report in reports if getattr(report, "when", "") == "call"
    ]
    lines = [line for handed in found if handed for line in json.loads(handed)["records"]]
    if not lines:
        return
    from harness.store.lines import record_of
    from harness.store.records import Measurement

    sys.path.insert(0, str(HERE))
    from overhead import table

    rows = table(record for line in lines if isinstance(record := record_of(line.encode()), Measurement))
    if rows:
        terminalreporter.section("time over that of a loop by hand")
        for row in rows:
            terminalreporter.write_line(row)
