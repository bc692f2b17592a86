"""Where a launcher accepts its nodes: they connect, present the token, and describe themselves."""

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
from harness.launch.start_wait import StartWait
from harness.worker.node_server import CONNECT_TIMEOUT_S, enable_keepalive

FAREWELL = b'{"command": "end"}\n'
"""The command by which a server ends, and is not started again."""

_LONGEST_HELLO = 4096
_ACCEPT_TIMEOUT_S = 0.2


class NodeListener:
    """Listens at ``place``, host and port, for nodes that present ``token``, or one that is drawn here.

    Raises:
        LaunchError: this process cannot listen there.
    """

    def __init__(self, place: tuple[str, int], token: str | None) -> None:
        self.token = token or secrets.token_hex(32)
        try:
            self._listener = socket.create_server(place, backlog=1024)
        except OSError as error:
            raise LaunchError(f"Plumbline cannot listen for its nodes at {place[0]}:{place[1]}: {error}") from error
        self.port: int = self._listener.getsockname()[1]

    def receive(self, count: int, processes: NodeProcesses, wait: StartWait) -> list[tuple[Node, socket.socket]]:
        """Wait until ``count`` nodes are here; return each with its connection, in their order.

        Raises:
            LaunchError: not all came, or one cannot take part.
        """
        here: dict[int, tuple[Node, socket.socket]] = {}
        try:
            while len(here) < count:
                connection = self._accept()
                if connection is None:
                    missing = f"{count - len(here)} of {count} nodes to connect to port {self.port}"
                    if processes.ended is None and wait.goes_on(missing):
                        continue
                    how = processes.ended or f"waited {wait.seconds:.0f} s"
                    raise LaunchError(f"{len(here)} of {count} nodes came up; {how}: {processes.output}")
                node = self._greet(connection)
                if node is None:
                    connection.close()
                    continue
                if reason := why_not(node, count, {number: one for number, (one, _) in here.items()}):
                    _dismiss(connection)
                    raise LaunchError(reason)
                here[node.number] = node, connection
                wait.report_progress()
        except BaseException:
            for _, connection in here.values():
                _dismiss(connection)
            raise
        self.close()
        return [here[number] for number in range(count)]

    def close(self) -> None:
        """Accept no more nodes."""
        self._listener.close()

    def _accept(self) -> socket.socket | None:
        """Return the next connection, None if there is none for a moment: then the processes are checked."""
        self._listener.settimeout(_ACCEPT_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            return self._listener.accept()[0]
        return None

    def _greet(self, connection: socket.socket) -> Node | None:
        """Return the node that connected, None if it is none of this launcher's."""
        connection.settimeout(CONNECT_TIMEOUT_S)
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
        enable_keepalive(connection)
        return node


def _dismiss(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(FAREWELL)
    connection.close()
