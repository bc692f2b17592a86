"""A forked rank as its supervisor sees it: its streams, its report, and how it ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from typing import IO

from plumbline.launch.stacks import PendingCall, calls_of
from plumbline.ranks.rank_main import How, RankReport, Streams
from plumbline.worker.processes import signal_session
from plumbline.worker.rank_handle import Log


class _Output:
    """What a rank prints to one stream, in a file without a name, which nobody has to remove."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.log = Log(f"/dev/fd/{self._file.fileno()}")

    def text(self) -> str:
        self.log.close()
        self._file.seek(0)
        with self._file:
            return self._file.read().decode(errors="replace")


class RankProcess:
    """One rank of a launch, from before its fork until its end is known."""

    def __init__(self, rank: int, capture: bool) -> None:
        self.rank = rank
        self.pid = 0
        self.report: RankReport | None = None
        self.code: int | None = None
        self.how: How | None = None
        self.calls: tuple[PendingCall, ...] = ()
        self.at = 0.0
        self.is_debugging = False
        self.connection, self.rank_connection = Pipe()
        self.outputs = [_Output(), _Output()] if capture else []
        self._stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def streams(self) -> Streams:
        out, err = (output.log.sink for output in self.outputs) if self.outputs else (None, None)
        return Streams(out, err, self._stack.fileno())

    @property
    def is_alive(self) -> bool:
        """Whether nobody has waited for its end yet."""
        return self.code is None

    @property
    def has_failed(self) -> bool:
        return self.how in (How.RAISED, How.DIED)

    def forked(self, pid: int) -> None:
        """In the supervisor, note the process id, and close the rank's ends."""
        self.pid = pid
        self.rank_connection.close()
        for output in self.outputs:
            os.close(output.log.sink)

    def close_in_fork(self) -> None:
        """In a rank, close the supervisor's ends."""
        self.connection.close()
        for output in self.outputs:
            output.log.close_in_fork()

    def note_end(self, how: How) -> None:
        """Note how it ended, unless that is known already."""
        if self.how is None:
            self.how, self.at = how, time.monotonic()
            if how is not How.RETURNED:
                self.calls = calls_of(os.pread(self._stack.fileno(), 1 << 18, 0).decode(errors="replace"))

    def request_stack(self) -> None:
        """Let it write its stacks. A stopped process has to continue for that."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def has_stack(self) -> bool:
        return os.fstat(self._stack.fileno()).st_size > 0

    def kill(self) -> None:
        """Kill it, and the processes that it left in its session."""
        signal_session(self.pid, signal.SIGKILL)

    def texts(self) -> tuple[str, str]:
        """Return what it printed to stdout and stderr. Call this once, after its end."""
        self._stack.close()
        if not self.outputs:
            return "", ""
        out, err = (output.text() for output in self.outputs)
        return out, err
