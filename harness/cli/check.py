"""``plumbline check``: is a training right on all of its ranks? It runs a user's own command, unmodified."""

from __future__ import annotations

import argparse
from typing import Any

from harness.check.command import check as run_check
from harness.check.options import RecordingOptions


def add_to(commands: Any) -> None:
    """Declare the command's arguments."""
    command = commands.add_parser("check", description=check.__doc__, usage="plumbline check [options] -- COMMAND …")
    command.add_argument("--steps", type=int, default=4, metavar="K", help="optimizer steps to record (default: 4)")
    command.add_argument("--after", type=int, default=0, metavar="N", help="optimizer steps to skip first (default: 0)")
    command.add_argument("--stop", action="store_true", help="end the script after the recorded steps (default: go on)")
    command.add_argument("--time-limit", type=float, metavar="S", help="end the command after S seconds (default: no)")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what starts the training")
    command.set_defaults(do=check)


def check(options: argparse.Namespace) -> int:
    """Run a training script as it is, record its first optimizer steps on every rank, and say whether they are right.

    Exit code: 0 all is right, 1 the training is wrong, 2 nothing could be judged.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    checked = run_check(command, RecordingOptions(options.steps, options.after, options.stop), options.time_limit)
    bad = False
    for one in checked.trainings:
        for finding in one.findings:
            noise = "" if finding.error_x_noise is None else f" ({finding.error_x_noise:.3g} × noise)"
            print(f"{finding.check}: {finding.outcome.value}: {finding.cause or ''} {finding.message}{noise}")
            bad = bad or finding.outcome.is_bad
    return 2 if not checked.trainings else int(bad)
