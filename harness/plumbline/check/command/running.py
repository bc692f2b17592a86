"""Runs a user's command, and ends it at a time limit, at Ctrl-C, or when this program is told to end.

A command that cannot be checked is refused before it is started. While it runs, its Python processes are followed, to
find out in which order they end.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from plumbline.core.errors import PlanError, PlumblineError
from plumbline.worker.processes import end_tagged, kills_for_memory

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
    if not program:
        raise PlanError("the first word after `--` is empty: write the command that starts the training")
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


GRACE_S = 10.0
"""Seconds that a command has to end after each signal."""


LOOK_EVERY_S = 0.5
"""Seconds between searches for new processes."""


class CommandError(PlumblineError):
    """A command that cannot be started."""


class EndOfCommand(Exception):  # noqa: N818 - nothing went wrong
    """Raised while a command runs, to end it."""


class EndedBy(Enum):
    """Who ended a command."""

    ITSELF = "itself"
    TIME_LIMIT = "time limit"
    USER = "user"
    VERDICT = "verdict"


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended: its exit code, which is negative for a signal, and after how many ``seconds``.

    ``out_of_memory`` counts the processes of the whole machine that the kernel killed meanwhile for lack of memory.
    """

    exit_code: int
    by: EndedBy
    seconds: float
    out_of_memory: int = 0

    @property
    def has_failed(self) -> bool:
        return self.by is EndedBy.ITSELF and self.exit_code != 0

    @property
    def in_words(self) -> str:
        """How it ended, for example ``exit code 1`` or ``signal SIGKILL``."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128 if self.exit_code > 128 else 0
        try:
            name = signal.Signals(number).name
        except ValueError:
            return f"exit code {self.exit_code}"
        return f"signal {name}" if self.exit_code < 0 else f"exit code {self.exit_code} ({name})"


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    tag: str,
    watch: ProcessWatch,
    time_limit: float | None = None,
    *,
    leaves_nothing: bool = False,
) -> CommandEnd:
    """Run a command with the standard streams of this process.

    If the command does not end by itself, or if ``leaves_nothing``, all of its processes are killed. The environment
    variable ``tag`` identifies them.
    It raises ``CommandError`` if the command cannot be started.
    """
    begun, killed = time.monotonic(), kills_for_memory()
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise CommandError(f"cannot start {command[0]}: {error.strerror}") from error
    by = EndedBy.ITSELF
    with termination_as_interrupt():
        try:
            watch.wait(process, time_limit)
        except subprocess.TimeoutExpired:
            by = EndedBy.TIME_LIMIT
        except EndOfCommand:
            by = EndedBy.VERDICT
        except KeyboardInterrupt:
            by = EndedBy.USER
        except BaseException:
            _kill(process, tag, environment[tag])
            raise
        try:
            if by is not EndedBy.ITSELF:
                _ask_to_end(process, (signal.SIGINT, signal.SIGTERM) if by is EndedBy.USER else (signal.SIGTERM,))
        except KeyboardInterrupt:  # kill it at once
            pass
        if by is not EndedBy.ITSELF or leaves_nothing:
            _kill(process, tag, environment[tag])
    return CommandEnd(process.wait(), by, time.monotonic() - begun, kills_for_memory() - killed)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP to this program as Ctrl-C. The command has its own session, so it receives neither."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask_to_end(process: subprocess.Popen[bytes], signals: Sequence[signal.Signals]) -> None:
    """Send the signals one after another, each ``GRACE_S`` seconds after the previous one.

    The next signal is sent at once if the user interrupts again. Some commands ignore one Ctrl-C, as srun does, but
    release their resources on other machines when they are terminated.
    """
    for number in signals:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            process.wait(GRACE_S)
            return


def _kill(process: subprocess.Popen[bytes], tag: str, value: str) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    end_tagged(value, tag)


class ProcessWatch:
    """Follows the processes that write notes to ``folder``. ``ended`` has their ids in the order in which they ended.

    ``on_look`` is called repeatedly, and can raise ``EndOfCommand``.
    If the system has no file descriptors for processes (Linux has them since 5.3), the order is unknown.
    """

    def __init__(self, folder: Path, on_look: Callable[[], None] | None = None) -> None:
        self.ended: list[int] = []
        self._on_look = on_look
        self._folder = folder
        self._known: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def wait(self, process: subprocess.Popen[bytes], seconds: float | None) -> None:
        """Wait for a child of this process.

        It raises ``subprocess.TimeoutExpired`` if the child has not ended after ``seconds``.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._follow(process.pid) and process.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(process.args, seconds or 0.0)
            self._look(LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
            if self._on_look is not None:
                self._on_look()
        process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Note the processes that ended last, and stop following all processes."""
        self._look(0.0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _look(self, seconds: float) -> None:
        for pid in self._begun():
            self._follow(pid)
        for key, _ in self._selector.select(seconds):
            self._selector.unregister(key.fd)
            os.close(key.fd)
            self.ended.append(key.data)

    def _begun(self) -> Iterator[int]:
        with suppress(OSError):
            for file in os.scandir(self._folder):
                kind, _, number = file.name.partition("-")
                if kind == "process" and int(number) not in self._known:
                    yield int(number)

    def _follow(self, pid: int) -> bool:
        if pid not in self._known and hasattr(os, "pidfd_open"):
            self._known.add(pid)
            try:
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            except ProcessLookupError:
                self.ended.append(pid)
            except OSError:
                return False
        return pid in self._known
