"""``plumbline new-subject`` and ``plumbline new-workload``: write a trainer or a problem that runs as it is."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from plumbline import own_workloads, subjects
from plumbline.cli.arguments import declare
from plumbline.core.invocation import command, suite_command
from plumbline.user_code.new_file import write_new_file


def add_to(commands: Any) -> None:
    for name, do, example in (
        ("new-subject", new_subject, "my_trainer.py"),
        ("new-workload", new_workload, "my_problem.py"),
    ):
        declare(commands, name, do)("file", type=Path, metavar="FILE.py", help=f"file to write, for example {example}")


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
