"""How a fork server and its ranks reach the launcher: two pipes on its machine, an authenticated channel elsewhere."""

from __future__ import annotations

import os
from typing import Protocol

from plumbline.worker.authenticated_channel import AuthenticatedChannel


class LauncherLink(Protocol):
    """Commands come in, and events go out, each a JSON object.

    ``from_ranks`` is a descriptor that is readable where there is something to ``forward``; None where there never is.
    """

    from_ranks: int | None

    def fileno(self) -> int:
        """Return a descriptor that is readable where there are commands."""
        ...

    def receive(self) -> list[bytes] | None:
        """Return the commands that have come; None: the launcher has closed its end. May raise OSError."""
        ...

    def announce(self, event: bytes) -> None:
        """Send an event of this process, the server or a rank. May raise OSError."""
        ...

    def forward(self) -> None:
        """In the server, send what ranks have announced. May raise OSError."""
        ...

    def close_in_fork(self) -> None:
        """In a rank, close what only the server uses."""
        ...


class EventPipe:
    """The writing end of a pipe that several processes share: a line is shorter than PIPE_BUF, so lines stay whole."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino

    def write(self, event: bytes) -> None:
        if os.fstat(self._descriptor).st_ino != self._inode:
            raise OSError("the descriptor of the fork server's events now belongs to another file")
        os.write(self._descriptor, event + b"\n")


class Lines:
    """Splits what is read from a descriptor into lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Return the lines that are complete with the next bytes; None at the end."""
        chunk = os.read(self._descriptor, 1 << 20)
        if not chunk:
            return None
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return whole


class PipeLink:
    """``commands`` and ``events`` are descriptors; ranks write to the launcher's pipe themselves."""

    from_ranks: int | None = None

    def __init__(self, commands: int, events: int) -> None:
        self._commands = commands
        self._lines = Lines(commands)
        self._events = EventPipe(events)

    def fileno(self) -> int:
        return self._commands

    def receive(self) -> list[bytes] | None:
        return self._lines.read()

    def announce(self, event: bytes) -> None:
        self._events.write(event)

    def forward(self) -> None:
        """Nothing passes through the server."""

    def close_in_fork(self) -> None:
        os.close(self._commands)


class NetworkLink:
    """A channel to the launcher. Its messages are numbered, so the server sends those of its ranks, from a pipe."""

    from_ranks: int | None

    def __init__(self, channel: AuthenticatedChannel) -> None:
        self._channel = channel
        self._server = os.getpid()
        source, sink = os.pipe()
        self.from_ranks = source
        os.set_blocking(source, False)
        self._lines = Lines(source)
        self._events = EventPipe(sink)

    def fileno(self) -> int:
        return self._channel.fileno()

    def receive(self) -> list[bytes] | None:
        return self._channel.receive()

    def announce(self, event: bytes) -> None:
        """Send an event, in the server after those that ranks have announced before."""
        if os.getpid() != self._server:
            self._events.write(event)
            return
        self.forward()
        self._channel.send(event)

    def forward(self) -> None:
        while True:
            try:
                lines = self._lines.read()
            except BlockingIOError:
                return
            for line in lines or ():
                self._channel.send(line)

    def close_in_fork(self) -> None:
        assert self.from_ranks is not None
        self._channel.close()
        os.close(self.from_ranks)
