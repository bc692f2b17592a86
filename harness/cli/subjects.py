"""``plumbline subjects``: the trainers that ship, and environments for exact versions of their libraries."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from harness.core.errors import SubjectError
from harness.core.invocation import command, suite_command
from harness.report.text import printable, printable_lines, shortened
from harness.subjects.environments import LIBRARIES, environments, install, pip_command, wanted

if TYPE_CHECKING:
    from rich.console import Console

    from harness.subjects.declare import Subject


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "list the trainers that ship; install one of an exact version beside this environment"
    command = commands.add_parser("subjects", help=told, description=listed.__doc__)
    command.set_defaults(do=listed)
    further = command.add_subparsers(metavar="COMMAND")
    told = "make an environment of its own for one version of a trainer's library"
    command = further.add_parser("install", help=told, description=installed.__doc__)
    command.add_argument("what", metavar="NAME==VERSION", help="for example lightning==2.5.5")
    command.set_defaults(do=installed)


@dataclass(frozen=True)
class Shipped:
    """A subject that ships. ``library`` is its library's version here, None where it is not installed.

    ``declared`` is what it declares, several times where its backends differ in it; where it cannot be imported,
    ``obstacle`` says why.
    """

    name: str
    library: str | None
    declared: tuple[Subject, ...] = ()
    obstacle: str | None = None


def shipped() -> list[Shipped]:
    """Return every subject that has a short name, as it is in this interpreter."""
    from harness.subjects.load import load
    from harness.subjects.short_names import SHORT_NAMES

    every = []
    for name in SHORT_NAMES:
        distribution = LIBRARIES.get(name, "plumbline").partition("[")[0]
        try:
            library = f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            every.append(Shipped(name, None))
            continue
        try:
            every.append(Shipped(name, library, tuple(load(name))))
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, SubjectError) else f"{type(error).__name__}: {error}"
            every.append(Shipped(name, library, obstacle=said.removeprefix("cannot be imported: ")))
    return every


def listed(options: argparse.Namespace) -> int:
    """List the trainers that ship: what is installed, what each of them does, and how to get the missing ones."""
    from rich.console import Console

    show(shipped(), Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    return 0


def show(subjects: list[Shipped], console: Console) -> None:
    """Print the subjects as a table as wide as ``console``, then what is missing, then what lies beside."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("Subject", "Library", "Backends", "Precisions", "Capabilities"):
        table.add_column(head, overflow="fold", no_wrap=head == "Subject")
    for shipped in subjects:
        does = [(one.backends, _precisions(one), sorted(one.capabilities)) for one in shipped.declared]
        for number, columns in enumerate(does or [()]):
            name, library = ("", "") if number else (shipped.name, shipped.library or "not installed")
            table.add_row(name, library, *map(" ".join, columns))
    console.print(table)
    as_it_is: Any = {"markup": False, "soft_wrap": True}  # to be copied: a line stays a line
    for shipped in subjects:
        if shipped.obstacle:
            console.print(f"{shipped.name} cannot be imported: {printable_lines(shipped.obstacle)}", **as_it_is)
        elif shipped.library is None:
            own = command("plumbline", "subjects", "install", f"{shipped.name}==VERSION")
            here = pip_command(shipped.name)
            console.print(
                f"{shipped.name}: install it here ({here}), or in an environment of its own ({own})", **as_it_is
            )
    for name, python in environments():
        console.print(f'{name}, in an environment of its own: --subject "…;python={python}"', **as_it_is)


def _precisions(subject: Subject) -> list[str]:
    """Return the precisions of a subject; one that not every accelerator has, with those that have it."""
    every = dict.fromkeys(precision for offered in subject.precisions.values() for precision in offered)
    where = {one: [name for name, offered in subject.precisions.items() if one in offered] for one in every}
    return [
        one if len(names) == len(subject.precisions) else f"{one} ({', '.join(names)})" for one, names in where.items()
    ]


def installed(options: argparse.Namespace) -> int:
    """Make a virtual environment with one version of a trainer's library and this interpreter's version of torch.

    It lies in the user's cache. What is there already is used as it is. pip's own settings (its configuration, and
    variables such as PIP_INDEX_URL) say where packages come from.
    """
    from rich.console import Console
    from rich.text import Text

    environment = wanted(options.what)
    console = Console(stderr=True, highlight=False)
    with console.status(f"{environment.requirement} …") as status:

        def tell(line: str) -> None:
            status.update(Text(shortened(f"{environment.requirement}: {printable(line)}", console.width - 4)))

        python = install(environment, tell)
    print(f"{environment.requirement} is installed, with {environment.torch}. Use it:")
    print(shlex.join(suite_command("--subject", f"{environment.subject};python={python}")))
    return 0
