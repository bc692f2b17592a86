"""Where a launcher receives its nodes: they connect, show the token, and say who they are."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time

from harness.core.errors import LaunchError
from harness.launch.remote.node_checks import Node, why_not
from harness.launch.remote.node_processes import NodeProcesses
from harness.worker.node_server import PATIENCE, notice_silence

FAREWELL = b'{"command": "end"}\n'
"""What a server is told that is to end, and not to come back."""

_LONGEST_HELLO = 4096


class NodeListener:
    """Listens at ``place``, host and port, for nodes that show ``token``, or one that is drawn here.

    Raises:
        LaunchError: nobody can listen there.
    """

    def __init__(self, place: tuple[str, int], token: str | None) -> None:
        self.token = token or secrets.token_hex(32)
        try:
            self._listener = socket.create_server(place, backlog=1024)
        except OSError as error:
            raise LaunchError(f"Plumbline cannot listen for its nodes at {place[0]}:{place[1]}: {error}") from error
        self.port: int = self._listener.getsockname()[1]

    def receive(self, count: int, starters: NodeProcesses, deadline: float) -> list[tuple[Node, socket.socket]]:
        """Wait until ``count`` nodes are here; return each with its connection, in their order.

        Raises:
            LaunchError: not all came, or one cannot take part.
        """
        waited = max(0.0, deadline - time.monotonic())
        here: dict[int, tuple[Node, socket.socket]] = {}
        try:
            while len(here) < count:
                connection = self._next(starters, deadline)
                if connection is None:
                    how = starters.ended or f"waited {waited:.0f} s"
                    raise LaunchError(f"{len(here)} of {count} nodes came up; {how}: {starters.said}")
                node = self._greet(connection)
                if node is None:
                    connection.close()
                    continue
                if reason := why_not(node, count, {number: one for number, (one, _) in here.items()}):
                    _dismiss(connection)
                    raise LaunchError(reason)
                here[node.number] = node, connection
        except BaseException:
            for _, connection in here.values():
                _dismiss(connection)
            raise
        self.close()
        return [here[number] for number in range(count)]

    def close(self) -> None:
        """Receive nobody any more."""
        self._listener.close()

    def _next(self, starters: NodeProcesses, deadline: float) -> socket.socket | None:
        """Return the next connection; None if a starter ended, or the deadline passed, before there was one."""
        while (left := deadline - time.monotonic()) > 0:
            # Looked at often enough to say at once that a starter ended before its nodes came.
            self._listener.settimeout(min(0.2, left))
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()[0]
            if starters.ended is not None:
                return None
        return None

    def _greet(self, connection: socket.socket) -> Node | None:
        """Return who it is that connected, None if it is nobody of ours."""
        connection.settimeout(PATIENCE)
        line = b""
        try:
            while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
                byte = connection.recv(1)
                if not byte:
                    return None
                line += byte
            hello = json.loads(line)
            if not hmac.compare_digest(str(hello["token"]), self.token):
                return None
            node = Node.of(hello, time.monotonic())
        except (OSError, ValueError, LookupError, TypeError):
            return None
        connection.settimeout(None)
        notice_silence(connection)
        return node


def _dismiss(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(FAREWELL)
    connection.close()
