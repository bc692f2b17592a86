"""``plumbline new-subject``: write an adapter to begin with, which runs at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plumbline.core.invocation import command
from plumbline.subjects.new_subject import write_new_subject


def add_to(commands: Any) -> None:
    parser = commands.add_parser("new-subject", description=new_subject.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="the file to write, for example my_trainer.py")
    parser.set_defaults(do=new_subject)


def new_subject(options: argparse.Namespace) -> int:
    """Write a commented trainer into a new file; an existing file is never overwritten."""
    write_new_subject(options.file)
    print(f"{options.file} is written. Does it run?  {command('plumbline', 'smoke', str(options.file))}")
    return 0
