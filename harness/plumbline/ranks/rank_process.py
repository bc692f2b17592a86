"""A forked rank as its supervisor knows it: its streams, its report, and how it ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from typing import IO

from plumbline.launch.stacks import PendingCall, calls_of
from plumbline.ranks.channel import Channel
from plumbline.ranks.rank import RankReport, Streams
from plumbline.ranks.rank_end import How
from plumbline.worker.log import Log
from plumbline.worker.processes import signal_session


class _Output:
    """What one stream of a rank prints: the beginning and the end, in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        # By its descriptor: nobody has to remove a file that has no name.
        self.log = Log(f"/dev/fd/{self._file.fileno()}")

    def text(self) -> str:
        """Return what was printed; the rank has ended."""
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
        self.channel, self.rank_channel = Channel.pair()
        self.outputs = [_Output(), _Output()] if capture else []
        self._stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def streams(self) -> Streams:
        """The descriptors that the rank writes to."""
        out, err = (output.log.sink for output in self.outputs) if self.outputs else (None, None)
        return Streams(out, err, self._stack.fileno())

    @property
    def is_alive(self) -> bool:
        """Whether nobody has waited for its end yet."""
        return self.code is None

    @property
    def has_failed(self) -> bool:
        """Whether it has raised or died."""
        return self.how in (How.RAISED, How.DIED)

    def forked(self, pid: int) -> None:
        """Take the process id, in the supervisor, and close what is the rank's."""
        self.pid = pid
        self.rank_channel.close()
        for output in self.outputs:
            os.close(output.log.sink)

    def close_in_fork(self) -> None:
        """Close the supervisor's ends, in a rank."""
        self.channel.close()
        for output in self.outputs:
            output.log.close_in_fork()

    def settle(self, how: How) -> None:
        """Take how it ended, if that is not known yet."""
        if self.how is None:
            self.how, self.at = how, time.monotonic()
            if how is not How.RETURNED:
                self.calls = self._read_stack()

    def request_stack(self) -> None:
        """Let it write its stacks; one that was stopped goes on for that."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def has_stack(self) -> bool:
        """Whether it has written its stacks."""
        return os.fstat(self._stack.fileno()).st_size > 0

    def kill(self) -> None:
        """End it, and what it has left in its session."""
        signal_session(self.pid, signal.SIGKILL)

    def texts(self) -> tuple[str, str]:
        """Return what it printed to stdout and stderr; it has ended."""
        self._stack.close()
        if not self.outputs:
            return "", ""
        out, err = (output.text() for output in self.outputs)
        return out, err

    def _read_stack(self) -> tuple[PendingCall, ...]:
        text = os.pread(self._stack.fileno(), 1 << 18, 0).decode(errors="replace")
        calls = calls_of(text)
        own = next((place for place, one in enumerate(calls) if _is_own(one)), len(calls))
        return calls[:own]


def _is_own(call: PendingCall) -> bool:
    return call.file.endswith("plumbline/ranks/rank.py") and call.name == "call"
