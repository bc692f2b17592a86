"""Shared by the commands: declaring a command, types of arguments, and printing an error."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, Final

from plumbline.report.text import printable_lines

ACCELERATOR: Final[Any] = {"metavar": "TYPE", "default": "auto"}
JSON: Final[Any] = {"action": "store_true", "help": "print everything as JSON, for programs"}
RUN: Final = "a run's folder, for example reports/latest"


def declare(commands: Any, name: str, do: Callable[[argparse.Namespace], int], **further: Any) -> Any:
    """Declare the command that calls ``do``, described by its docstring; return the function that adds arguments."""
    parser = commands.add_parser(name, **{"description": do.__doc__, **further})
    parser.set_defaults(do=do)
    return parser.add_argument


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {value}")
        return value

    return number


def duration(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def print_error(error: BaseException | str) -> None:
    # The text may come from a recorded run, so control characters are escaped.
    print(f"plumbline: {printable_lines(str(error))}", file=sys.stderr)
