"""Prints each trainer's overhead over a hand-written loop at the end of the session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from plumbline.pytest_plugin.run_on_disk import payload_of

HERE = Path(__file__).parent.resolve()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of overheads, trainers side by side."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    found = [payload_of(report) for report in reports if isinstance(report, pytest.TestReport)]
    sys.path.insert(0, str(HERE))
    from overhead import table

    rows = table(figure for one in found if one is not None for figure in one.measurements)
    if rows:
        terminalreporter.section("overhead: time relative to a hand-written loop")
        for row in rows:
            terminalreporter.write_line(row)
