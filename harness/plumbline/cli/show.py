"""``plumbline show``: everything that a run recorded about one cell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from plumbline.report.one_cell import cell_called, cell_outcomes, matching, one_cell
from plumbline.report.text import counted
from plumbline.results.run import read_run

WIDTH = 100


def add_to(commands: Any) -> None:
    command = commands.add_parser("show", description=show.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument(
        "cell",
        metavar="CELL",
        help="the cell's id or parts of it, for example 'mlp ddp 2x2 16'; if several match, the only one that failed",
    )
    command.set_defaults(do=show)


def show(options: argparse.Namespace) -> int:
    """Show one cell of a run: findings, causes, figures, expected failures, the command to reproduce it, logs."""
    run = read_run(options.run)
    outcomes = cell_outcomes(run)
    cell = cell_called(options.cell, outcomes)
    others = len(matching(options.cell, outcomes)) - 1
    if others > 0 and cell != options.cell:
        print(f"plumbline: {counted(others, 'more cell')} matched; showing the only one that failed", file=sys.stderr)
    colour = sys.stdout.isatty()
    print(one_cell(run, cell, width=WIDTH, colour=colour))
    return 0
