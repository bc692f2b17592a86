"""Where a launcher accepts its nodes, which prove that they know the token and describe themselves."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket

from plumbline.core.errors import LaunchError
from plumbline.launch.remote.greetings import Greetings
from plumbline.launch.remote.node_checks import Node, why_not
from plumbline.launch.remote.node_processes import NodeProcesses
from plumbline.launch.start_wait import StartWait
from plumbline.worker.authenticated_channel import AuthenticatedChannel
from plumbline.worker.node_server import TOKEN

FAREWELL = b'{"command": "end"}'
"""The command that ends a server for good."""

_SHORTEST_TOKEN = 16
_CHECK_INTERVAL_S = 0.2


class NodeListener:
    """Listens at ``place``, host and port, for nodes that know ``token`` (None: a random one).

    Raises:
        LaunchError: This process cannot listen there, or the token is too short.
    """

    def __init__(self, place: tuple[str, int], token: str | None) -> None:
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise LaunchError(
                f"{TOKEN} has {len(token)} characters, which can be guessed from a recorded greeting: use at least "
                f"{_SHORTEST_TOKEN}, for example from `openssl rand -hex 32`, or unset it"
            )
        self.token = token or secrets.token_hex(32)
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        try:
            listener = socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(f"Plumbline cannot listen for its nodes at {place[0]}:{place[1]}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._greetings = Greetings(listener, self.token)
        self._open = True

    @property
    def refusals(self) -> str:
        """The number of rejected connections, and why the last one was rejected; "" without any."""
        return str(self._greetings.refusals)

    def receive(self, count: int, processes: NodeProcesses, wait: StartWait) -> list[tuple[Node, AuthenticatedChannel]]:
        """Wait for ``count`` nodes, then accept no more; return each with its channel, in their order.

        Raises:
            LaunchError: A node did not connect, or cannot take part.
        """
        here: dict[int, tuple[Node, AuthenticatedChannel]] = {}
        try:
            while len(here) < count:
                try:
                    node, channel = self._greetings.joined.get(timeout=_CHECK_INTERVAL_S)
                except queue.Empty:
                    refused = f"; {self.refusals}" if self.refusals else ""
                    missing = f"{count - len(here)} of {count} nodes to connect to port {self.port}{refused}"
                    if processes.ended is None and wait.goes_on(missing):
                        continue
                    how = processes.ended or f"waited {wait.seconds:.0f} s"
                    raise LaunchError(
                        f"{len(here)} of {count} nodes came up; {how}{refused}: {processes.output}"
                    ) from None
                if reason := why_not(node, count, {number: one for number, (one, _) in here.items()}):
                    _dismiss(channel)
                    raise LaunchError(reason)
                here[node.number] = node, channel
                wait.report_progress()
        except BaseException:
            for _, channel in here.values():
                _dismiss(channel)
            raise
        self.close()
        return [here[number] for number in range(count)]

    def close(self) -> None:
        """Accept no more nodes, and dismiss those that were not received."""
        if not self._open:
            return
        self._open = False
        self._greetings.close()
        while not self._greetings.joined.empty():
            _dismiss(self._greetings.joined.get()[1])


def _dismiss(channel: AuthenticatedChannel) -> None:
    with contextlib.suppress(OSError):
        channel.send(FAREWELL)
    channel.close()
