"""Runs a user's command with recording on, and judges what its processes left."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.check.evidence import RecordedTraining
from harness.check.judge.judge import judge
from harness.check.options import RecordingOptions, write_options
from harness.check.read import read_trainings
from harness.core.errors import PlumblineError
from harness.core.finding import Finding

ENVIRONMENT = "PLUMBLINE_CHECK"
"""The variable that names the folder of a check; processes below the command inherit it."""

START_FOLDER = Path(__file__).parent / "path"


@dataclass(frozen=True)
class CheckedTraining:
    """One training of a command and what was found in it."""

    training: RecordedTraining
    findings: list[Finding]


@dataclass(frozen=True)
class CheckedCommand:
    """A command that ended with ``exit_code``, negative for a signal, and its trainings."""

    command: tuple[str, ...]
    exit_code: int
    trainings: list[CheckedTraining]
    timed_out: bool = False


class CommandError(PlumblineError):
    """A command that cannot be started."""


def check(command: Sequence[str], options: RecordingOptions, time_limit: float | None = None) -> CheckedCommand:
    """Run a command, record the first optimizer steps of every process below it, and judge them.

    Its output goes where this process's goes. After ``time_limit`` seconds it is ended, and what was recorded until
    then is judged. Nothing is left in its folder.

    Raises:
        CommandError: the command cannot be started.
        TraceError: evidence cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="plumbline-check-") as folder:
        write_options(Path(folder), options)
        exit_code, timed_out = _run(command, environment(folder), time_limit)
        trainings = [CheckedTraining(one, judge(one)) for one in read_trainings(Path(folder))]
    return CheckedCommand(tuple(command), exit_code, trainings, timed_out)


def environment(folder: str) -> dict[str, str]:
    """Return the environment in which every Python process records to ``folder``."""
    path = os.pathsep.join(filter(None, [str(START_FOLDER), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, ENVIRONMENT: folder, "PYTHONPATH": path}


def _run(command: Sequence[str], variables: dict[str, str], time_limit: float | None) -> tuple[int, bool]:
    try:
        process = subprocess.Popen(command, env=variables, start_new_session=True)
    except OSError as error:
        raise CommandError(f"cannot start {command[0]}: {error.strerror}") from error
    try:
        return process.wait(time_limit), False
    except subprocess.TimeoutExpired:
        return _end(process), True
    except KeyboardInterrupt:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a command and what it started; return its exit code."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(10)
            break
        except subprocess.TimeoutExpired:
            continue
    return process.wait()
