"""The link of a fork server and its ranks to the launcher: two pipes, or an authenticated channel from another machine.

Commands come in, and events go out, each a JSON object.
"""

from __future__ import annotations

import os

from plumbline.worker.authenticated_channel import AuthenticatedChannel


class EventPipe:
    """The writing end of a pipe that several processes share. Lines stay whole, as they are shorter than PIPE_BUF."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino

    def write(self, event: bytes) -> None:
        if os.fstat(self._descriptor).st_ino != self._inode:
            raise OSError("the descriptor of the fork server's events now belongs to another file")
        os.write(self._descriptor, event + b"\n")


class Lines:
    """Splits the bytes read from a descriptor into lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Return the lines that the next bytes complete, None at the end."""
        chunk = os.read(self._descriptor, 1 << 20)
        if not chunk:
            return None
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return whole


class PipeLink:
    """A link on the launcher's machine; ``commands`` and ``events`` are descriptors. Ranks write to ``events``, too."""

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
        """Do nothing: the launcher reads what ranks announce."""

    def close_in_fork(self) -> None:
        os.close(self._commands)


class NetworkLink:
    """A link by network. Messages are numbered, so only the server sends them: ranks write their events to a pipe.

    ``from_ranks`` is a descriptor that is readable if there is something to ``forward``.
    """

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
        """Send an event. The server first sends what ranks have announced before."""
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


LauncherLink = PipeLink | NetworkLink
