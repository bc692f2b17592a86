"""``plumbline report``: write a run's tables again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    command = commands.add_parser("report", help="write a run's tables again", description=report.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.set_defaults(do=report)


def report(options: argparse.Namespace) -> int:
    """Write ``support.md``, ``support.csv`` and ``metrics.csv`` of a run again, from its results."""
    from harness.report.write import write_report
    from harness.store.run import read_run

    write_report(options.run)
    print(read_run(options.run).path / "support.md")
    return 0
