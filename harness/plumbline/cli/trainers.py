"""The commands about trainers and problems: ``plumbline smoke``, ``subjects``, ``new-subject``, ``new-workload``."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plumbline import own_workloads, subjects
from plumbline.cli.arguments import ACCELERATOR, JSON, declare
from plumbline.core.errors import PlumblineError
from plumbline.core.invocation import command, suite_command
from plumbline.core.training_behavior import EVERY_OTHER
from plumbline.report.text import printable, printable_lines, shortened
from plumbline.subjects.declare import Subject
from plumbline.subjects.load import Shipped, shipped
from plumbline.subjects.virtual_environments import environments, install, parse_requirement, pip_command


def add_to(commands: Any) -> None:
    add = declare(commands, "smoke", smoke)
    what = "the trainer, as for --subject: file.py, file.py::name, package.module or a short name"
    add("subject", metavar="WHAT", help=what)
    add("--accelerator", **ACCELERATOR, help="type of device; cpu simulates devices (default: auto)")

    further = commands.add_parser("subjects", description=listed.__doc__)
    further.set_defaults(do=listed)
    further.add_argument("--json", **JSON)
    does = "create an environment with one version of a trainer's library"
    add = declare(further.add_subparsers(metavar="COMMAND"), "install", installed, help=does)
    add("what", metavar="NAME==VERSION", help="for example lightning==2.5.5")

    for name, do, file in (
        ("new-subject", new_subject, "my_trainer.py"),
        ("new-workload", new_workload, "my_problem.py"),
    ):
        add = declare(commands, name, do)
        add("file", type=Path, metavar="FILE.py", help=f"file to write, for example {file}")


def smoke(options: argparse.Namespace) -> int:
    """Train a tiny model, and say whether the adapter or the trainer is wrong.

    The model is trained on two devices, then with the other declared backends and precisions.

    Exit code: 0 all is right, 1 the trainer is wrong, 2 the adapter is wrong, 4 unknown subject.
    """
    from plumbline.engine.smoke import smoke as run_smoke

    worst = run_smoke(options.subject, options.accelerator)
    if not worst:
        print(f"Next, the whole matrix:  {shlex.join(suite_command('--subject', options.subject))}")
    return worst


def listed(options: argparse.Namespace) -> int:
    """List the trainers that ship: what is installed, what each supports, and how to install what is missing."""
    if options.json:
        from plumbline.cli.documents import SubjectsDocument, print_document

        print_document(SubjectsDocument.of(shipped()))
        return 0
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
        one if EVERY_OTHER in names or {"cpu", "cuda"} <= {*names} else f"{one} ({', '.join(names)})"
        for one, names in where.items()
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


def new_subject(options: argparse.Namespace) -> int:
    """Write a commented trainer to a new file. An existing file is not overwritten."""
    write_new_file(options.file, Path(subjects.__file__).with_name("skeleton.py"), "my-trainer")
    print(f"{options.file} was written. Try it:  {command('plumbline', 'smoke', str(options.file))}")
    return 0


def new_workload(options: argparse.Namespace) -> int:
    """Write a commented training problem to a new file. An existing file is not overwritten."""
    write_new_file(options.file, Path(own_workloads.__file__).with_name("skeleton.py"), "my-problem")
    training = shlex.join(suite_command("--workload", str(options.file), "--gpus", "2"))
    print(f"{options.file} was written. Train it on up to two devices:  {training}")
    return 0


def write_new_file(path: Path, skeleton: Path, name: str) -> None:
    if path.suffix != ".py":
        raise PlumblineError(f"{path} is not a Python file: use the name {path.with_suffix('.py').name}")
    own = re.sub(r"[^A-Za-z0-9.+]+", "-", path.stem).strip("-.+") or name
    text = skeleton.read_text(encoding="utf-8").replace(f'"{name}"', f'"{own}"').replace(skeleton.name, path.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PlumblineError(f"{path} already exists; choose another name") from error
    except FileNotFoundError as error:
        raise PlumblineError(f"folder {path.parent} does not exist: create it first") from error
