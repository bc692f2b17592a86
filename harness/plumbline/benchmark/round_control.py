"""The parent's side of the barrier between rounds: it waits for all ranks, and releases them together."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plumbline.core.errors import LaunchError
from plumbline.worker.timing.round_barrier import GO, REPORT


class MissingRanksError(Exception):
    """The ranks ``ranks`` did not reach the barrier. ``late``: they still run, but the time limit has passed."""

    def __init__(self, ranks: set[int], *, late: bool) -> None:
        super().__init__(f"ranks {sorted(ranks)} did not reach the barrier")
        self.ranks = ranks
        self.late = late


class RoundControl:
    """The barrier of one launch's ranks, a Unix socket at ``path``; raises ``LaunchError`` if it cannot be bound."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self._ranks = set(range(ranks))
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"cannot create a socket at {path} ({error}): set TMPDIR to a shorter path on this machine"
            ) from error
        self._listener.listen(ranks)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._names: dict[socket.socket, int] = {}
        self._rests: dict[socket.socket, bytes] = {}
        self._gone: set[int] = set()

    def wait(self, seconds: float) -> None:
        """Wait for every rank; raise ``MissingRanksError`` if one closes its connection or exceeds ``seconds``."""
        for _ in self._next_lines(seconds):
            pass

    def release(self) -> None:
        self._send(GO)

    def reports(self, seconds: float) -> list[dict[str, Any]]:
        """Request the reports of all ranks, which wait at the barrier; return them in the order of the ranks."""
        self._send(REPORT)
        return [json.loads(line) for _, line in sorted(self._next_lines(seconds))]

    def close(self) -> None:
        """Close all connections. Waiting ranks take this as the end."""
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in self._rests:
            connection.close()
        self._rests = {}

    def _send(self, message: bytes) -> None:
        for connection in self._rests:
            try:
                connection.sendall(message)
            except OSError:
                continue  # closed: the next wait reports it

    def _next_lines(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        waiting = set(self._ranks)
        deadline = time.monotonic() + seconds
        while waiting:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MissingRanksError(waiting, late=True)
            for key, _ in ready:
                connection = key.fileobj
                if connection is self._listener:
                    new, _ = self._listener.accept()
                    self._rests[new] = b""
                    self._selector.register(new, selectors.EVENT_READ)
                    continue
                assert isinstance(connection, socket.socket)
                for rank, line in self._lines(connection):
                    waiting.discard(rank)
                    yield rank, line
            if waiting & self._gone:
                raise MissingRanksError(waiting & self._gone, late=False)

    def _lines(self, connection: socket.socket) -> Iterator[tuple[int, bytes]]:
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._selector.unregister(connection)
            del self._rests[connection]
            connection.close()
            self._gone.add(self._names[connection])
            return
        *whole, self._rests[connection] = (self._rests[connection] + chunk).split(b"\n")
        for line in whole:
            if connection in self._names:
                yield self._names[connection], line
            else:
                self._names[connection] = int(line)
