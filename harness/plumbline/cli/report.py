"""``plumbline report``: rewrite the pages and tables of a run, or print one of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlanError
from plumbline.report.formats import format_names, report_format, write_report
from plumbline.results.files import write_text
from plumbline.results.run import read_run


def add_to(commands: Any) -> None:
    names = format_names()
    descriptions = "; ".join(f"{name}: {report_format(name).description}" for name in names)
    command = commands.add_parser("report", description=report.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument("--format", choices=names, help=f"write only this format ({descriptions})")
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the format to FILE (default: print it)"
    )
    command.set_defaults(do=report)


def report(options: argparse.Namespace) -> int:
    """Rewrite a run's report from its results: report.html, report.md, support.md, support.csv and metrics.csv.

    With --format, that format is printed or written to FILE, and the run's folder is left unchanged.
    """
    run = read_run(options.run)
    chosen = None if options.format is None else report_format(options.format)
    if chosen is None and options.output is not None:
        raise PlanError("-o writes a single format: add --format")
    if chosen is None:
        write_report(options.run)
        print(run.path / "report.html")
    elif options.output is not None:
        write_text(options.output, chosen.render(run))
    else:
        sys.stdout.write(chosen.render(run))
    return 0
