"""``plumbline doctor``: is this machine fit for a run?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

UNFIT = 1
"""Exit code if the machine has a problem."""


def add_to(commands: Any) -> None:
    command = commands.add_parser("doctor", description=doctor.__doc__)
    command.add_argument(
        "--report-dir",
        type=Path,
        default=Path("reports"),
        metavar="DIR",
        help="where runs go (default: reports/)",
    )
    command.set_defaults(do=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Check this machine for everything that a run needs. A line is ok, or begins with !! and says what to do.

    A line that begins with ~~ is a note: the machine is fit for a run, but busy, for example.

    Exit code: 0 no problem, 1 at least one problem.
    """
    from rich.console import Console
    from rich.text import Text

    from plumbline.machine.doctor.probes import probes, run_probes
    from plumbline.report.text import printable

    console = Console(highlight=False, soft_wrap=True)
    problems = notes = 0
    for name, line in run_probes(probes(options.report_dir)):
        sign, style = ("ok", "green")
        if line.advice is not None:
            sign, style = ("~~", "yellow") if line.is_note else ("!!", "bold red")
            notes += line.is_note
            problems += not line.is_note
        text = Text.assemble((sign, style), " ", (name, "bold"), f": {printable(line.found)}")
        if line.advice is not None:
            text.append(f"; {printable(line.advice)}")
        console.print(text)
        sys.stdout.flush()
    summary = "This machine is fit for a run." if not problems else f"Problems to solve first: {problems} (see !!)."
    console.print(f"{summary} Notes: {notes} (see ~~)." if notes else summary, style="bold")
    return UNFIT if problems else 0
