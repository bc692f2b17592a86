"""``plumbline new-workload``: write a training problem that runs as it is."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from plumbline import own_workloads
from plumbline.core.invocation import suite_command
from plumbline.user_code.new_file import write_new_file


def add_to(commands: Any) -> None:
    parser = commands.add_parser("new-workload", description=new_workload.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to write, for example my_problem.py")
    parser.set_defaults(do=new_workload)


def new_workload(options: argparse.Namespace) -> int:
    """Write a commented training problem to a new file. An existing file is not overwritten."""
    write_new_file(options.file, Path(own_workloads.__file__).with_name("skeleton.py"), "my-problem")
    command = shlex.join(suite_command("--workload", str(options.file), "--gpus", "2"))
    print(f"{options.file} was written. Train it on up to two devices:  {command}")
    return 0
