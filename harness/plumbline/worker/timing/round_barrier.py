"""A rank's side of the barrier between rounds: it reports that it has arrived, and waits for a command.

This uses a Unix socket that the parent listens on. The rank sends its number and a newline, then a newline for each
boundary it has reached; the parent answers each with one byte.
"""

from __future__ import annotations

import json
import socket
from typing import Any

GO = b"g"
"""Go on with the next round."""

REPORT = b"r"
"""Report what was measured, and train on without being timed."""


class RoundBarrier:
    """The connection of one rank."""

    def __init__(self, path: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(b"%d\n" % rank)

    def wait(self) -> bytes:
        """Report that this rank has reached the boundary, and return the parent's command.

        Raises:
            ConnectionError: the parent has given the measurement up.
        """
        self._socket.sendall(b"\n")
        command = self._socket.recv(1)
        if not command:
            raise ConnectionError("the measurement was given up, probably because another rank or group ended badly")
        return command

    def report(self, values: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(values).encode() + b"\n")
        self._socket.close()
