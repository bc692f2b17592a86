"""``plumbline smoke``: is the adapter wrong, or the trainer?"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from plumbline.cli.arguments import ACCELERATOR, declare
from plumbline.core.invocation import suite_command
from plumbline.engine.smoke import smoke as run_smoke


def add_to(commands: Any) -> None:
    add = declare(commands, "smoke", smoke)
    what = "the trainer, as for --subject: file.py, file.py::name, package.module or a short name"
    add("subject", metavar="WHAT", help=what)
    add("--accelerator", **ACCELERATOR, help="cpu simulates devices (default: auto)")


def smoke(options: argparse.Namespace) -> int:
    """Train a tiny model on two devices, then with the other declared backends and precisions, and print the cause.

    Exit code: 0 all is right, 1 the trainer is wrong, 2 the adapter is wrong, 4 unknown subject.
    """
    worst = run_smoke(options.subject, options.accelerator)
    if not worst:
        print(f"Next, the whole matrix:  {shlex.join(suite_command('--subject', options.subject))}")
    return worst
