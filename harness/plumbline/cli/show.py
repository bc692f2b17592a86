"""``plumbline show``: everything that a run knows about one cell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from plumbline.report.terminal.one_cell import cell_called, cell_outcomes, matching, one_cell
from plumbline.results.run import read_run

WIDTH = 100


def add_to(commands: Any) -> None:
    command = commands.add_parser("show", description=show.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument(
        "cell",
        metavar="CELL",
        help="its id, or parts of it, for example 'mlp ddp 2x2 16'; of several matching cells, the one that went wrong",
    )
    command.set_defaults(do=show)


def show(options: argparse.Namespace) -> int:
    """Show one cell of a run: findings and causes, figures, expected failures, how to reproduce it, its ranks' logs."""
    run = read_run(options.run)
    outcomes = cell_outcomes(run)
    cell = cell_called(options.cell, outcomes)
    others = len(matching(options.cell, outcomes)) - 1
    if others > 0 and cell != options.cell:
        print(f"plumbline: {others} more cells match; this is the only one that went wrong", file=sys.stderr)
    colour = sys.stdout.isatty()
    print(one_cell(run, cell, width=WIDTH, colour=colour))
    return 0
