"""Messages between two processes that were one before a fork: pickled, with the length before each."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from typing import Any

_LENGTH = 8


class Channel:
    """One end of a connection. Either side may close it at any time; an incomplete message is dropped."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a connection."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._line.fileno()

    def send(self, message: object) -> None:
        """Send a message; wait until the other end has taken it, or the system's buffer has.

        Raises:
            OSError: the other end is closed.
        """
        data = pickle.dumps(message)
        self._line.sendall(len(data).to_bytes(_LENGTH, "little") + data)

    def drain(self) -> tuple[list[Any], bool]:
        """Return the messages that have arrived, without waiting, and whether the other end is still open."""
        is_open = True
        while is_open:
            try:
                is_open = self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        return list(self._complete()), is_open

    def receive(self) -> Any:
        """Wait for one message, and return it; None where the other end is closed."""
        while self._read():
            for message in self._complete():
                return message
        return None

    def close(self) -> None:
        """Close this end."""
        self._line.close()

    def _read(self, flags: int = 0) -> bool:
        """Read once; return False where the other end is closed."""
        try:
            chunk = self._line.recv(1 << 20, flags)
        except ConnectionError:
            return False
        self._rest += chunk
        return bool(chunk)

    def _complete(self) -> Iterator[Any]:
        while len(self._rest) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._rest[:_LENGTH], "little")
            if len(self._rest) < end:
                return
            data = bytes(self._rest[_LENGTH:end])
            del self._rest[:end]
            yield pickle.loads(data)
