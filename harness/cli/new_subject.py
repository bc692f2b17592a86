"""``plumbline new-subject``: a file to begin with, which runs at once."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import harness.subjects
from harness.core.errors import SubjectError
from harness.core.invocation import command

SKELETON = Path(harness.subjects.__file__).with_name("skeleton.py")
NAME = "my-trainer"
"""What the skeleton calls itself."""
FILE = "skeleton.py"
"""What its text calls its file."""


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "write a trainer under test that runs at once, to be replaced by yours piece by piece"
    command = commands.add_parser("new-subject", help=told, description=new_subject.__doc__)
    command.add_argument("file", type=Path, metavar="FILE.py", help="the file to write, for example my_trainer.py")
    command.set_defaults(do=new_subject)


def new_subject(options: argparse.Namespace) -> int:
    """Write a commented trainer into a new file, never over one that is there."""
    write(options.file)
    print(f"{options.file} is written. Does it run?  {command('plumbline', 'smoke', str(options.file))}")
    return 0


def write(path: Path) -> None:
    """Write the skeleton to ``path``, with a name for reports made of the file's.

    Raises:
        SubjectError: something is there already, its folder is missing, or it would be no Python file.
    """
    if path.suffix != ".py":
        raise SubjectError(f"{path} is no Python file: call it {path.with_suffix('.py').name}")
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", path.stem).strip("-.+") or NAME
    text = SKELETON.read_text(encoding="utf-8").replace(f'name="{NAME}"', f'name="{name}"').replace(FILE, path.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SubjectError(f"{path} is there already, and it is left as it is: take another name") from error
    except FileNotFoundError as error:
        raise SubjectError(f"there is no folder {path.parent}: make it first") from error
