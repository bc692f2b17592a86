"""``plumbline submit``: a run over the machines of an engine, in tasks that share its cells."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlanError
from plumbline.core.exit_codes import TROUBLE
from plumbline.core.invocation import command
from plumbline.submit.engines import ENGINES, find_engine


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        description="Run `plumbline run ARGUMENTS` on the machines of an engine (a SLURM, Kubernetes or Ray cluster), "
        "split over tasks; wait, resubmit what a preempted or failed task left undone, and merge all parts into one "
        "run. The report directory must be on a file system that this machine and every node mount at the same path; "
        "for slurm and ray the environment, and the checkout if there is one, too.",
    )
    add = parser.add_argument
    add("--engine", default="slurm", metavar="NAME", help=f"{', '.join(ENGINES)} (default: %(default)s)")
    add("--nodes", type=int, metavar="N", help="nodes of each task")
    add("--gpus", type=int, metavar="N", help="devices of each node")
    add("--array", type=int, default=1, metavar="N", help="tasks that share the cells (default: 1)")
    variable = "a variable to set; NAME alone has the value of here (repeatable)"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=variable)
    add("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu requests no gpus from the engine")
    add("--report-dir", type=Path, metavar="DIR", help="where the run is written (default: reports/)")
    add("--dry-run", action="store_true", help="print what would be sent, and the cells, and submit nothing")
    add("--attach", type=Path, metavar="RUN", help="resume a run that was submitted, for example reports/latest")
    for engine in ENGINES.values():
        engine.add_options(add)
    add("arguments", nargs="*", metavar="-- ARGUMENTS", help="as for plumbline run, or for pytest with a path")
    example = command("plumbline", "submit", "--nodes", "1", "--gpus", "2", "--", "--workloads", "mlp")
    parser.set_defaults(do=submit, hint_for_unknown=f"; options of the run follow `--`, as in: {example}")


def submit(options: argparse.Namespace) -> int:
    """Submit a run, or resume one, and wait for its end; the exit code is pytest's."""
    from plumbline.report.formats import write_report
    from plumbline.report.terminal.end_of_run import support_for_terminal
    from plumbline.submit.follow import Follower
    from plumbline.submit.request import SubmitRequest, prepare
    from plumbline.submit.submission import Submission

    if options.attach:
        submission = Submission.load(options.attach)
    else:
        if options.nodes is None or options.gpus is None:
            raise PlanError("submit needs --nodes and --gpus (of each node), or --attach RUN")
        request = SubmitRequest(
            engine=find_engine(options),
            nodes=options.nodes,
            gpus=options.gpus,
            tasks=options.array,
            accelerator=options.accelerator,
            report_dir=options.report_dir,
            pytest=tuple(options.arguments),
        )
        submission = prepare(request, ("plumbline", *sys.argv[1:]))
        if options.dry_run:
            print(submission.engine.text(submission, submission.new_job(), range(len(submission.tasks))), end="")
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
