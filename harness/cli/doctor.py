"""``plumbline doctor``: is this machine fit for a run?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

UNFIT = 1
"""Exit code where something is to be done first."""


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "is this machine fit for a run: devices, links, communication, limits, versions"
    command = commands.add_parser("doctor", help=told, description=doctor.__doc__)
    command.add_argument(
        "--report-dir", type=Path, default=Path("reports"), metavar="DIR", help="where runs are to go (reports/)"
    )
    command.set_defaults(do=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Ask this machine what a run will ask of it. Each line is ok, or begins with !! and says what to do.

    A line that begins with ~~ is a note: the machine is fit for a run, but busy, for example.

    Exit code: 0 all is well, 1 something is to be done.
    """
    from rich.console import Console
    from rich.text import Text

    from harness.machine.doctor.probes import probes, run_probes
    from harness.report.text import printable

    console = Console(highlight=False, soft_wrap=True)
    troubles = notes = 0
    for name, line in run_probes(probes(options.report_dir)):
        sign, style = ("ok", "green")
        if line.advice is not None:
            sign, style = ("~~", "yellow") if line.is_note else ("!!", "bold red")
            notes += line.is_note
            troubles += not line.is_note
        told = Text.assemble((sign, style), " ", (name, "bold"), f": {printable(line.found)}")
        if line.advice is not None:
            told.append(f"; {printable(line.advice)}")
        console.print(told)
        sys.stdout.flush()
    summary = "This machine is fit for a run." if not troubles else f"To be done before a run: {troubles} (see !!)."
    console.print(f"{summary} Notes: {notes} (see ~~)." if notes else summary, style="bold")
    return UNFIT if troubles else 0
