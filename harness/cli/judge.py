"""``plumbline judge``: judge a recorded run again, with the judge of today."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.engine.rejudge import Rejudged
    from harness.results.records import Result

CHANGED = 1
"""Exit code where the present judge says something else than the recorded one, as diff's."""


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "judge a run's traces again, without training, and show what changed"
    command = commands.add_parser("judge", help=told, description=judge.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.set_defaults(do=judge)


def judge(options: argparse.Namespace) -> int:
    """Judge a recorded run again, from its traces, and show what changed. Nothing is written.

    Kept are the traces of what did not pass; of every cell with ``pytest --keep-traces``.
    """
    from harness.engine.rejudge import rejudge
    from harness.results.run import read_run

    run = read_run(options.run)
    cells = rejudge(run)
    judged = [cell for cell in cells if cell.obstacle is None]
    changed = [cell for cell in judged if not cell.same]
    for cell in changed:
        print(cell.cell)
        print("\n".join(f"  {line}" for line in _changes(cell)))
    for cell in cells:
        if cell.obstacle:
            print(f"{cell.cell}\n  not judged again: {cell.obstacle}")
    without = len(run.header.planned) - len(cells)
    print(
        f"{len(judged)} cells judged again: {len(judged) - len(changed)} as recorded, {len(changed)} changed; "
        f"{len(cells) - len(judged)} could not be, {without} kept no traces"
    )
    return CHANGED if changed else 0


def _changes(cell: Rejudged) -> list[str]:
    before, now = ({result.check: result for result in results} for results in (cell.recorded, cell.now))
    lines = []
    for check in dict.fromkeys((*before, *now)):
        if before.get(check) != now.get(check):
            lines += [f"{check}: was {_said(before.get(check))}", f"{' ' * len(check)}  is  {_said(now.get(check))}"]
    # The same findings in another order are not the same bytes.
    return lines or ["the same findings, in another order"]


def _said(result: Result | None) -> str:
    if result is None:
        return "not asked"
    cause = f" ({result.family}: {result.cause})" if result.cause else ""
    return f"{result.outcome.value}{cause}: {' '.join(result.message.split())}"
