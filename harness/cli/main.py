"""The command ``plumbline``: a run of the suites, and what there is around it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from harness.cli import compare, doctor, judge, new_subject, report, run, show, smoke, subjects, submit
from harness.core.errors import PlumblineError
from harness.core.exit_codes import TROUBLE, USAGE

COMMANDS = (new_subject, smoke, run, subjects, judge, report, show, compare, submit, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.do(options))
    except (PlumblineError, OSError) as error:
        print(f"plumbline: {error}", file=sys.stderr)
        return TROUBLE
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell has it


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="plumbline", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose exit code tells a wrong command line from every other trouble, as pytest's does."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
