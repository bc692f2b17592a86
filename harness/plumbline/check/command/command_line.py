"""Refuses a command that cannot be checked, before it is started, and says what to do instead."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from plumbline.core.errors import PlanError

SEPARATOR = "--"

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*$")
_IGNORES_ENVIRONMENT = {
    "I": "Python's -I ignores environment variables",
    "E": "Python's -E ignores environment variables",
    "S": "Python's -S imports no site module",
}
_WITH_VALUE = "WXcm"


def command_in(words: Sequence[str]) -> list[str]:
    """Return the command after the separator.

    It raises ``PlanError`` if the separator or the command is missing, or if it cannot be started or recorded.
    """
    if not words or words[0] != SEPARATOR:
        example = " ".join(words) or "torchrun --nproc-per-node 2 train.py"
        raise PlanError(f"write `--` and then the command that starts the training: plumbline check -- {example}")
    command = list(words[1:])
    if not command:
        raise PlanError("there is no command after `--`: write what starts the training, such as python train.py")
    _refuse_what_cannot_start(command)
    _refuse_what_cannot_be_followed(command)
    return command


def _refuse_what_cannot_start(command: Sequence[str]) -> None:
    program = command[0]
    if shutil.which(program) is not None:
        return
    if not Path(program).exists():
        hint = "install it in this environment" if os.sep not in program else "check the path"
        raise PlanError(f"command {program} not found: {hint}")
    if Path(program).is_dir():
        raise PlanError(f"{program} is a folder, not a command")
    if program.endswith(".py"):
        raise PlanError(f"{program} is not a command: write python {program}")
    raise PlanError(f"{program} is not executable: run chmod +x {program}, or write the interpreter before it")


def _refuse_what_cannot_be_followed(command: Sequence[str]) -> None:
    if not _INTERPRETER.match(Path(command[0]).name):
        return
    flags, script = _flags(command[1:])
    for flag in flags:
        if flag in _IGNORES_ENVIRONMENT:
            raise PlanError(f"{_IGNORES_ENVIRONMENT[flag]}, so recording cannot start: leave out -{flag} for the check")
    if script is not None and not Path(script).exists():
        raise PlanError(f"there is no file {script} in {Path.cwd()}")


def _flags(words: Sequence[str]) -> tuple[str, str | None]:
    """Return the letters of an interpreter's flags, and the script, or None for ``-m``, ``-c`` and standard input."""
    flags = ""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            return flags, None if word == "-" else word
        if word.startswith("--"):
            continue
        for index, letter in enumerate(word[1:], 2):
            if letter in "cm":
                return flags, None
            if letter in _WITH_VALUE:
                if index == len(word):
                    next(rest, None)
                break
            flags += letter
    return flags, None
