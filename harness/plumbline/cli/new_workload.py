"""``plumbline new-workload``: write a training problem to begin with, which runs at once."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from plumbline.core.invocation import suite_command
from plumbline.own_workloads.new_workload import write_new_workload


def add_to(commands: Any) -> None:
    parser = commands.add_parser("new-workload", description=new_workload.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="the file to write, for example my_problem.py")
    parser.set_defaults(do=new_workload)


def new_workload(options: argparse.Namespace) -> int:
    """Write a commented training problem into a new file; an existing file is never overwritten."""
    write_new_workload(options.file)
    command = shlex.join(suite_command("--workload", str(options.file), "--gpus", "2"))
    print(f"{options.file} is written. Train it on up to two devices:  {command}")
    return 0
