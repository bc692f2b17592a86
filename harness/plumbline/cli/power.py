"""``plumbline power``: how small an error the judge notices in a trainer's own configuration."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.cli.print_error import print_error
from plumbline.core.errors import PlanError
from plumbline.core.exit_codes import TROUBLE

if TYPE_CHECKING:
    from plumbline.power.measure import Power


def add_to(commands: Any) -> None:
    command = commands.add_parser("power", description=power.__doc__)
    command.add_argument("--subject", required=True, metavar="WHAT", help="a trainer, as for the suites")
    command.add_argument(
        "--workload", default="mlp", metavar="NAME|FILE", help="what is trained: a name, or a file of your own"
    )
    command.add_argument("--gpus", type=int, default=2, metavar="K", help="devices of the largest cell (default: 2)")
    command.add_argument("--backends", type=_names, metavar="A,B", help="cells of these backends alone")
    command.add_argument("--precisions", type=_names, metavar="A,B", help="cells of these precisions alone")
    command.add_argument("--runs", type=int, default=100, metavar="N", help="errors of each kind (default: 100)")
    command.add_argument(
        "--trainings", type=int, default=10, metavar="N", help="over how many trainings they are spread (default: 10)"
    )
    command.set_defaults(do=power)


def power(options: argparse.Namespace) -> int:
    """Train a right trainer, put known errors into what it recorded, and find the smallest that the judge notices.

    For each cell: the smallest relative error of a gradient, of an update and of a reported loss that is caught in 99 %
    of the runs, which is all of them where there are fewer than 100. A run is a step, and a tensor or all of them, of
    one of several trainings with different weights, data and order.

    Exit code: 0, 2 if a training is found wrong without any error put in, 4 invalid usage.
    """
    from plumbline.engine.open_subject import open_subject
    from plumbline.power.cells import cells_of
    from plumbline.power.measure import NotRightError, measure

    if min(options.runs, options.trainings) < 1:
        raise PlanError("--runs and --trainings must be 1 or more")
    try:
        with (
            open_subject(options.subject) as (pool, declared),
            tempfile.TemporaryDirectory(prefix="plumbline-") as scratch,
        ):
            for cell in cells_of(declared, options.workload, options.gpus, options.backends, options.precisions):
                found = measure(pool, cell, Path(scratch, "trace"), runs=options.runs, trainings=options.trainings)
                print(f"\n{cell.id}")
                print("\n".join(power_lines(found)), flush=True)
    except NotRightError as error:
        print_error(error)
        return TROUBLE
    return 0


def power_lines(found: Iterable[Power]) -> Iterable[str]:
    yield f"  {'relative error of a':<26} {'caught':>10} {'in runs':>14} {'in half':>10}"
    for one in found:
        if one.limit is None or one.median is None:
            yield f"  {one.kind:<26} {'nothing to judge':>25}"
        else:
            yield f"  {one.kind:<26} {one.limit:>10.1e} {f'{one.caught} of {one.runs}':>14} {one.median:>10.1e}"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
