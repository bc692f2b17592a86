"""``plumbline judge``: judge a recorded run again, with this version of the judge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plumbline.cli.arguments import print_error
from plumbline.core.errors import TROUBLE
from plumbline.engine.rejudge import Rejudged, rejudge
from plumbline.report.text import counted, printable, printable_lines
from plumbline.results.records import Result
from plumbline.results.run import read_run

CHANGED = 1
"""Exit code if findings differ from the recorded ones, as for diff."""


def add_to(commands: Any) -> None:
    command = commands.add_parser("judge", description=judge.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="WHAT",
        help="your own workload that the run used, as it was given to the run (repeatable)",
    )
    command.set_defaults(do=judge)


def judge(options: argparse.Namespace) -> int:
    """Judge a recorded run again from its traces, and print the findings that changed. Nothing is written.

    A run keeps the traces of cells that did not pass; with ``--keep-traces``, of every cell.

    Exit code: 0 no finding changed, 1 some changed, 2 nothing could be judged, 4 invalid command line.
    """
    run = read_run(options.run)
    cells = rejudge(run, options.workload)
    judged = [cell for cell in cells if cell.obstacle is None]
    changed = [cell for cell in judged if not cell.same]
    for cell in changed:
        print(printable(cell.cell))
        print("\n".join(f"  {printable_lines(line)}" for line in _changes(cell)))
    for cell in cells:
        if cell.obstacle:
            print(f"{printable(cell.cell)}\n  not judged again: {printable(cell.obstacle)}")
    without = len(run.header.planned) - len(cells)
    print(
        f"{counted(len(judged), 'cell')} judged again: {len(judged) - len(changed)} unchanged, {len(changed)} changed; "
        f"{len(cells) - len(judged)} could not be judged, {without} without traces"
    )
    if not judged:
        hint = "" if cells else ": repeat the run with --keep-traces"
        print_error(f"no cell could be judged again{hint}")
        return TROUBLE
    return CHANGED if changed else 0


def _changes(cell: Rejudged) -> list[str]:
    before, now = ({result.check: result for result in results} for results in (cell.recorded, cell.now))
    lines = []
    for check in dict.fromkeys((*before, *now)):
        if before.get(check) != now.get(check):
            lines.append(f"{check}: was {_described(before.get(check))}")
            lines.append(f"{' ' * len(check)}  is  {_described(now.get(check))}")
    # Records are compared byte for byte, so their order counts.
    return lines or ["same findings, different order"]


def _described(result: Result | None) -> str:
    if result is None:
        return "not checked"
    cause = f" ({result.family}: {result.cause})" if result.cause else ""
    return f"{result.outcome.value}{cause}: {' '.join(result.message.split())}"
