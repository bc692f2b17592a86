"""Reports the detection suite, which tests the judge, not a trainer. It runs only if its path is named.

``pytest suites/`` tests the user's trainer, within minutes. ``pytest suites/detection`` tests the judge, and ends with
its score, in the terminal and in ``detection.md`` in the report directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.resolve()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the score, and write it to the report directory."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    found = [dict(report.user_properties).get("detection") for report in calls]
    if not any(found):
        return
    sys.path.insert(0, str(HERE))
    from score import Tried, table

    lines = table([Tried(**values) for values in found if values])
    terminalreporter.section("detection")
    for line in lines:
        terminalreporter.write_line(line)
    given = config.getoption("report_dir", None)
    folder = Path(given) if given else config.rootpath / "reports"
    if folder.is_dir():
        (folder / "detection.md").write_text("\n".join(["# Detection", "", *lines]) + "\n")
