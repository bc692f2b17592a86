"""``plumbline show``: everything that a run knows about one cell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import PlumblineError

if TYPE_CHECKING:
    from harness.store.run import Run

WIDEST = 100
MOST_CANDIDATES = 30


class NoSuchCell(PlumblineError):  # noqa: N818 - named after what is wrong
    """No cell of the run has such a name, or several have."""


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "everything that a run knows about one cell"
    command = commands.add_parser("show", help=told, description=show.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument(
        "cell", metavar="CELL", help="its id, or parts of it that no other cell has, for example 'mlp ddp 2x2 16'"
    )
    command.set_defaults(do=show)


def show(options: argparse.Namespace) -> int:
    """Show one cell of a run: findings and causes, figures, what was expected, how to see it again, its ranks' logs."""
    from harness.report.one_cell import one_cell
    from harness.store.run import read_run

    run = read_run(options.run)
    cell = cell_called(options.cell, _cells(run))
    colour = sys.stdout.isatty()
    print(one_cell(run, cell, width=WIDEST, colour=colour))
    return 0


def cell_called(name: str, cells: Sequence[str]) -> str:
    """Return the id that is ``name``, or the only one that has all of its words.

    Raises:
        NoSuchCell: none has, or several have; the sentence names them.
    """
    if name in cells:
        return name
    found = [cell for cell in cells if all(word in cell for word in name.split())]
    if len(found) == 1:
        return found[0]
    from harness.report.text import printable

    asked = printable(name)
    if not found:
        raise NoSuchCell(f"no cell of this run is called {asked!r}, or has all of its words")
    shown = [f"  {printable(cell)}" for cell in found[:MOST_CANDIDATES]]
    if len(found) > MOST_CANDIDATES:
        shown.append(f"  … and {len(found) - MOST_CANDIDATES} more")
    raise NoSuchCell("\n".join([f"{len(found)} cells of this run have {asked!r} in their names:", *shown]))


def _cells(run: Run) -> list[str]:
    every = (*run.header.planned, *run.results, *run.measurements)
    return list(dict.fromkeys(record.cell for record in every))
