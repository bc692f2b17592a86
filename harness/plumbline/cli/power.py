"""``plumbline power``: the smallest error that the judge detects in a trainer's configuration."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.cli.arguments import at_least, declare, names, print_error
from plumbline.core.errors import TROUBLE

if TYPE_CHECKING:
    from plumbline.power import Power


def add_to(commands: Any) -> None:
    add = declare(commands, "power", power)
    add("--subject", required=True, metavar="WHAT", help="the trainer, as for the suites")
    workload = "a built-in workload, or a file with your own (default: mlp)"
    add("--workload", default="mlp", metavar="NAME|FILE", help=workload)
    add("--gpus", type=int, default=2, metavar="K", help="maximum number of devices (default: 2)")
    add("--backends", type=names, metavar="A,B", help="only these backends (default: all)")
    add("--precisions", type=names, metavar="A,B", help="only these precisions (default: all)")
    runs = "number of injected errors of each kind (default: 100)"
    add("--runs", type=at_least(1), default=100, metavar="N", help=runs)
    trainings = "number of trainings over which the injected errors are spread (default: 10)"
    add("--trainings", type=at_least(1), default=10, metavar="N", help=trainings)


def power(options: argparse.Namespace) -> int:
    """Train a correct trainer, inject known errors into its evidence, and find the smallest that the judge detects.

    For each cell, print the limit, which is the smallest relative error of a gradient, an update and a reported loss
    that is detected in 99 % of the runs (in all of them, if there are fewer than 100), and the smallest that is
    detected in 50 %. Each run picks a step and one or all tensors of one of several trainings, which differ in weights,
    data and order.

    Exit code: 0 measured, 2 a training is wrong without an injected error, 4 invalid command line.
    """
    from plumbline.engine.subject_pools import open_subject
    from plumbline.planning.plan import Matrix, check_ranks
    from plumbline.power import NotRightError, cells_of, measure

    check_ranks(Matrix(options.gpus))

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
    yield f"  {'relative error of a':<26} {'limit':>10} {'caught in':>14} {'50 % from':>10}"
    for one in found:
        if one.limit is None or one.median is None:
            yield f"  {one.kind:<26} {'nothing to judge':>25}"
        else:
            yield f"  {one.kind:<26} {one.limit:>10.1e} {f'{one.caught} of {one.runs}':>14} {one.median:>10.1e}"
