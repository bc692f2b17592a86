"""``plumbline report``: write a run's pages and tables again, or show one of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import PlumblineError
from harness.core.exit_codes import USAGE

if TYPE_CHECKING:
    from harness.results.run import Run

FORMATS = ("md", "html", "csv", "json", "parquet")


class NoParquet(PlumblineError):  # noqa: N818 - named after what is wrong
    """Nothing here can write Parquet."""


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "write a run's pages and tables again, or show one of them"
    command = commands.add_parser("report", help=told, description=report.__doc__)
    command.add_argument("run", type=Path, metavar="RUN", help="a run's folder, for example reports/latest")
    command.add_argument(
        "--format",
        choices=FORMATS,
        help="only this: the page of one screen, the whole page, every figure in long form (csv, parquet), or all "
        "that the pages say for a program",
    )
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it (default: print it)")
    command.set_defaults(do=report)


def report(options: argparse.Namespace) -> int:
    """Write a run's report again from its results: report.html, report.md, support.md, support.csv and metrics.csv.

    With --format nothing is written into the run's folder: one of them is printed, or written to FILE.
    """
    from harness.report.write import write_report
    from harness.results.atomic import write_text
    from harness.results.run import read_run

    run = read_run(options.run)
    if complaint := _complaint(options.format, options.output):
        print(f"plumbline report: {complaint}", file=sys.stderr)
        return USAGE
    if options.format is None:
        write_report(options.run)
        print(run.path / "report.html")
    elif options.format == "parquet":
        _write_parquet(run, options.output)
    elif options.output is not None:
        write_text(options.output, _text(run, options.format))
    else:
        sys.stdout.write(_text(run, options.format))
    return 0


def _complaint(form: str | None, output: Path | None) -> str | None:
    if form is None and output is not None:
        return "-o names where one format is written: say which with --format"
    if form == "parquet" and output is None:
        return "--format parquet is not for reading: name a file with -o"
    return None


def _text(run: Run, form: str) -> str:
    if form == "md":
        from harness.report.markdown.one_screen import one_screen

        return one_screen(run)
    if form == "html":
        from harness.report.html.page import report_page

        return report_page(run)
    if form == "csv":
        from harness.report.tables.metrics import metrics_table
        from harness.report.write import as_csv

        return as_csv(metrics_table(run))
    from harness.report.json_report import as_json

    return f"{as_json(run)}\n"


def _write_parquet(run: Run, output: Path) -> None:
    from harness.report.tables.metrics import metrics_table

    try:
        metrics_table(run).to_parquet(output, index=False)
    except ImportError as error:
        raise NoParquet("--format parquet needs pyarrow: pip install pyarrow, or take --format csv") from error
