"""``plumbline new-subject``: write an adapter that runs as it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plumbline import subjects
from plumbline.core.invocation import command
from plumbline.user_code.new_file import write_new_file


def add_to(commands: Any) -> None:
    parser = commands.add_parser("new-subject", description=new_subject.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to write, for example my_trainer.py")
    parser.set_defaults(do=new_subject)


def new_subject(options: argparse.Namespace) -> int:
    """Write a commented trainer to a new file. An existing file is not overwritten."""
    write_new_file(options.file, Path(subjects.__file__).with_name("skeleton.py"), "my-trainer")
    print(f"{options.file} was written. Try it:  {command('plumbline', 'smoke', str(options.file))}")
    return 0
