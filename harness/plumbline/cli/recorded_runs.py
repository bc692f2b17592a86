"""The commands that read recorded runs: ``plumbline report``, ``show``, ``history`` and ``judge``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from plumbline.cli.arguments import JSON, RUN, declare, path, print_error
from plumbline.core.errors import TROUBLE, PlanError
from plumbline.core.numbers import counted
from plumbline.report.formats import format_names, report_format, write_report
from plumbline.report.output_file import refuse_unwritable, write_output
from plumbline.report.text import printable, printable_lines
from plumbline.results.run import read_run

if TYPE_CHECKING:
    from plumbline.engine.rejudge import Rejudged
    from plumbline.results.records import Result

CHANGED = 1  # exit code of ``judge`` if findings differ from the recorded ones, as for diff


def add_to(commands: Any) -> None:
    formats = format_names()
    descriptions = "; ".join(f"{name}: {report_format(name).description}" for name in formats)
    add = declare(commands, "report", report)
    add("run", type=path, metavar="RUN", help=RUN)
    add("--format", choices=formats, help=f"write only this format ({descriptions})")
    add("-o", "--output", type=path, metavar="FILE", help="write the format to FILE (default: print it)")

    add = declare(commands, "show", show)
    add("run", type=path, metavar="RUN", help=RUN)
    cell = "the cell's id or parts of it, for example 'mlp ddp 2x2 16'; if several match, the only one that failed"
    add("cell", metavar="CELL", help=cell)
    add("--json", **JSON)

    add = declare(commands, "history", history)
    add("folder", type=path, metavar="FOLDER", help="a folder of runs, for example reports")
    add("-o", "--output", type=path, metavar="SITE", help="folder of the site (default: FOLDER/history)")

    add = declare(commands, "judge", judge)
    add("run", type=path, metavar="RUN", help=RUN)
    workload = "your own workload that the run used, as it was given to --workload (repeatable)"
    add("--workload", action="append", default=[], metavar="WHAT", help=workload)


def report(options: argparse.Namespace) -> int:
    """Rewrite a run's report from its results: report.html, report.md, support.md, support.csv and metrics.csv.

    With --format, that format is printed or written to FILE, and the run's folder is left unchanged.
    """
    run = read_run(options.run)
    chosen = None if options.format is None else report_format(options.format)
    if chosen is None and options.output is not None:
        raise PlanError("-o writes a single format: add --format")
    if options.output is not None:
        refuse_unwritable("-o", options.output)
    if chosen is None:
        write_report(options.run)
        print(run.path / "report.html")
    elif options.output is not None:
        write_output(options.output, chosen.render(run))
    else:
        sys.stdout.write(chosen.render(run))
    return 0


def show(options: argparse.Namespace) -> int:
    """Show one cell of a run: findings, causes, figures, expected failures, the command to reproduce it, logs."""
    from plumbline.report.one_cell import cell_called, cell_outcomes, matching, one_cell

    run = read_run(options.run)
    outcomes = cell_outcomes(run)
    cell = cell_called(options.cell, outcomes)
    others = len(matching(options.cell, outcomes)) - 1
    if others > 0 and cell != options.cell:
        print(f"plumbline: {counted(others, 'more cell')} matched; showing the only one that failed", file=sys.stderr)
    if options.json:
        from plumbline.cli.documents import CellDocument, print_document

        print_document(CellDocument.of(run, cell))
    else:
        print(one_cell(run, cell, colour=sys.stdout.isatty()))
    return 0


def history(options: argparse.Namespace) -> int:
    """Make a small site about all runs in a folder: what changed, when, and what else was different then.

    It has a row for each cell and each measured figure, and a badge for each subject, all with relative
    addresses: it works from a disk, as an artifact of CI and on a static host.
    """
    from plumbline.report.history.site import INDEX, write_site

    site = options.output or options.folder / "history"
    found = write_site(options.folder, site)
    for reason in found.unreadable:
        print_error(f"skipped: {reason}")
    print(site / INDEX)
    return 0


def judge(options: argparse.Namespace) -> int:
    """Judge a recorded run again from its traces, and print the findings that changed. Nothing is written.

    A run keeps the traces of cells that did not pass; with ``--keep-traces``, of every cell.

    Exit code: 0 no finding changed, 1 some changed, 2 nothing could be judged, 4 invalid command line.
    """
    from plumbline.engine.rejudge import rejudge

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
