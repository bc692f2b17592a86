"""Runs a user's command, and ends it at a time limit, at Ctrl-C, or when this program is told to end.

It also finds out in which order the command's Python processes end.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from plumbline.core.errors import PlumblineError
from plumbline.launch.process_tags import end_tagged
from plumbline.worker.processes import kills_for_memory

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
