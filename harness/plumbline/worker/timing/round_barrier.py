"""A rank's side of the barrier between rounds, on a Unix socket that the parent listens on.

The rank sends its number and a newline, then a newline at each boundary. The parent answers each with one byte.
"""

from __future__ import annotations

import json
import socket
from typing import Any

GO = b"g"
"""Begin the next round."""

REPORT = b"r"
"""Report the measurements, and continue untimed."""


class RoundBarrier:
    """The connection of one rank."""

    def __init__(self, path: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(b"%d\n" % rank)

    def wait(self) -> bytes:
        """Wait at a boundary, and return the parent's command."""
        self._socket.sendall(b"\n")
        command = self._socket.recv(1)
        if not command:
            raise ConnectionError("the parent stopped the measurement, probably because another rank or group failed")
        return command

    def report(self, values: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(values).encode() + b"\n")
        self._socket.close()
