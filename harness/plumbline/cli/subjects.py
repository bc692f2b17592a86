"""``plumbline subjects``: the trainers that ship, and environments for their libraries."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plumbline.cli.arguments import declare
from plumbline.core.invocation import command, suite_command
from plumbline.report.text import printable, printable_lines, shortened
from plumbline.subjects.declare import Subject
from plumbline.subjects.load import Shipped, shipped
from plumbline.subjects.virtual_environments import environments, install, parse_requirement, pip_command


def add_to(commands: Any) -> None:
    further = commands.add_parser("subjects", description=listed.__doc__)
    further.set_defaults(do=listed)
    does = "create an environment with one version of a trainer's library"
    add = declare(further.add_subparsers(metavar="COMMAND"), "install", installed, help=does)
    add("what", metavar="NAME==VERSION", help="for example lightning==2.5.5")


def listed(options: argparse.Namespace) -> int:
    """List the trainers that ship: what is installed, what each supports, and how to install what is missing."""
    show(shipped(), Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    return 0


def show(subjects: list[Shipped], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("Subject", "Library", "Backends", "Precisions", "Capabilities"):
        table.add_column(head, overflow="fold", no_wrap=head == "Subject")
    for one in subjects:
        does = [(declared.backends, _precisions(declared), sorted(declared.capabilities)) for declared in one.declared]
        for number, columns in enumerate(does or [()]):
            name, library = ("", "") if number else (one.name, one.library or "not installed")
            table.add_row(name, library, *map(" ".join, columns))
    console.print(table)
    verbatim: Any = {"markup": False, "soft_wrap": True}  # not wrapped, so that commands can be copied
    for one in subjects:
        if one.obstacle:
            console.print(f"{one.name} cannot be imported: {printable_lines(one.obstacle)}", **verbatim)
        elif one.library is None:
            own = command("plumbline", "subjects", "install", f"{one.name}==VERSION")
            here = pip_command(one.name)
            console.print(f"{one.name}: install it here ({here}) or in a separate environment ({own})", **verbatim)
    for name, python in environments():
        console.print(f'{name}, in a separate environment: --subject "…;python={python}"', **verbatim)


def _precisions(subject: Subject) -> list[str]:
    every = dict.fromkeys(precision for offered in subject.precisions.values() for precision in offered)
    where = {one: [name for name, offered in subject.precisions.items() if one in offered] for one in every}
    return [
        one if len(names) == len(subject.precisions) else f"{one} ({', '.join(names)})" for one, names in where.items()
    ]


def installed(options: argparse.Namespace) -> int:
    """Create a virtual environment with one version of a trainer's library and this interpreter's version of torch.

    It is stored in the user's cache. An existing environment is not changed. pip's configuration, and variables such as
    PIP_INDEX_URL, decide where packages come from.
    """
    environment = parse_requirement(options.what)
    console = Console(stderr=True, highlight=False)
    with console.status(f"{environment.requirement} …") as status:

        def show_progress(line: str) -> None:
            status.update(Text(shortened(f"{environment.requirement}: {printable(line)}", console.width - 4)))

        python = install(environment, show_progress)
    print(f"{environment.requirement} is installed, with {environment.torch}. To use it:")
    print(shlex.join(suite_command("--subject", f"{environment.subject};python={python}")))
    return 0
