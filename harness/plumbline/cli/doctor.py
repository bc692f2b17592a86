"""``plumbline doctor``: check that this machine can run the suites."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from plumbline.cli.arguments import JSON, declare
from plumbline.core.numbers import counted

UNFIT = 1  # exit code if this machine has a problem


def add_to(commands: Any) -> None:
    folder = "folder for runs (default: reports/)"
    add = declare(commands, "doctor", doctor)
    add("--report-dir", type=Path, default=Path("reports"), metavar="DIR", help=folder)
    add("--json", **JSON)


def doctor(options: argparse.Namespace) -> int:
    """Check that this machine has everything that a run needs.

    Each line begins with ok, with !! (a problem, and how to solve it) or with ~~ (a note: the machine is busy, for
    example).

    Exit code: 0 no problem, 1 at least one problem.
    """
    from rich.console import Console
    from rich.text import Text

    from plumbline.machine.doctor.probes import probes, run_probes
    from plumbline.report.text import printable

    if options.json:
        from plumbline.cli.documents import DoctorDocument, print_document

        document = DoctorDocument.of(run_probes(probes(options.report_dir)))
        print_document(document)
        return 0 if document.ready else UNFIT
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
    summary = f"Fix {counted(problems, 'problem')} first (lines marked !!)." if problems else "This machine is ready."
    console.print(f"{summary} {counted(notes, 'note')} (lines marked ~~)." if notes else summary, style="bold")
    return UNFIT if problems else 0
