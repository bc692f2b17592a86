"""Measures, and has the machine for itself meanwhile; ends with what trainers cost over a loop by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.pytest_plugin.xdist_transport import payload_of

HERE = Path(__file__).parent.resolve()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Show what the trainers cost over a loop by hand, beside each other."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    found = [payload_of(report) for report in reports if isinstance(report, pytest.TestReport)]
    sys.path.insert(0, str(HERE))
    from overhead import table

    rows = table(figure for one in found if one is not None for figure in one.measurements)
    if rows:
        terminalreporter.section("time over that of a loop by hand")
        for row in rows:
            terminalreporter.write_line(row)
