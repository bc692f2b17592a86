"""``plumbline submit``: a run over the nodes of a SLURM cluster, as one job array."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.core.errors import PlanError
from harness.core.exit_codes import TROUBLE
from harness.core.invocation import command


def add_to(commands: Any) -> None:
    """Declare the command's arguments."""
    parser = commands.add_parser(
        "submit",
        description="Run `plumbline run ARGUMENTS --launcher slurm` on a SLURM cluster, split over a job array; wait, "
        "resubmit what a preempted or failed task left undone, and merge all parts into one run. The environment, the "
        "checkout if there is one, and the report directory must be on a file system that every node mounts.",
    )
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="nodes of each job")
    add("--gpus", type=int, metavar="N", help="devices of each node")
    add("--array", type=int, default=1, metavar="N", help="tasks that share the cells (default: 1)")
    add("--partition", metavar="NAME", help="the partition to run in")
    add("--time", metavar="LIMIT", help="time limit of each task in SLURM's format, for example 02:00:00")
    add("--module", action="append", default=[], metavar="NAME", help="a module to load (repeatable)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable to set (repeatable)")
    add("--slurm", action="append", default=[], metavar="NAME=VALUE", help="any other option of sbatch (repeatable)")
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu requests no gpus from SLURM")
    add("--report-dir", type=Path, metavar="DIR", help="where the run is written (default: reports/)")
    add("--dry-run", action="store_true", help="print the batch script and the cells, and submit nothing")
    add("--attach", type=Path, metavar="RUN", help="resume a run that was submitted, for example reports/latest")
    add("arguments", nargs="*", metavar="-- ARGUMENTS", help="as for plumbline run, or for pytest with a path")
    parser.set_defaults(do=submit)


def submit(options: argparse.Namespace) -> int:
    """Submit a run, or resume one, and wait for its end; the exit code is pytest's."""
    from harness.report.formats import write_report
    from harness.report.terminal.end_of_run import support_for_terminal
    from harness.slurm.follow import Follower
    from harness.slurm.submission import Submission
    from harness.slurm.submit_request import SubmitRequest, prepare

    if options.attach:
        submission = Submission.load(options.attach)
    else:
        if options.nodes is None or options.gpus is None:
            raise PlanError("submit needs --nodes and --gpus (of each node), or --attach RUN")
        submission = prepare(
            SubmitRequest(
                nodes=options.nodes,
                gpus=options.gpus,
                tasks=options.array,
                partition=options.partition,
                time=options.time,
                modules=tuple(options.module),
                environment=_pairs("--env", options.env),
                slurm=_pairs("--slurm", options.slurm, valueless=True),
                accelerator=options.accelerator,
                report_dir=options.report_dir,
                pytest=tuple(options.arguments),
            ),
            ("plumbline", *sys.argv[1:]),
        )
        if options.dry_run:
            print(submission.batch.text(), end="")
            for task, cells in enumerate(submission.tasks):
                print(f"# task {task}: {len(cells)} cells: {', '.join(cells[:3])}{', …' if len(cells) > 3 else ''}")
            return 0
        submission.save()
    later = command("plumbline", "submit", "--attach", str(submission.run))
    print(f"{submission.run}: to resume it later, {later}")
    run = Follower(submission, lambda line: print(line, flush=True)).follow()
    if run is None:
        return TROUBLE
    write_report(run.path)
    print(support_for_terminal(run, width=100, colour=sys.stdout.isatty()).rstrip("\n"))
    print(f"report: {run.path / 'support.md'}")
    return TROUBLE if run.footer is None else run.footer.exit_status


def _pairs(option: str, given: list[str], *, valueless: bool = False) -> dict[str, Any]:
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or valueless):
            raise PlanError(f"{option} {text!r} should look like NAME=VALUE")
        found[name] = value if equals else None
    return found
