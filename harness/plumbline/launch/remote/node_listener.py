"""Where a launcher accepts its nodes: they connect, show that they know the token, and describe themselves."""

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
"""The command by which a server ends, and is not started again."""

_SHORTEST_TOKEN = 16
_CHECK_INTERVAL_S = 0.2


class NodeListener:
    """Listens at ``place``, host and port, for nodes that know ``token``, or one that is drawn here.

    Raises:
        LaunchError: this process cannot listen there, or the token is too short.
    """

    def __init__(self, place: tuple[str, int], token: str | None) -> None:
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise LaunchError(
                f"{TOKEN} has {len(token)} characters, and who records a greeting can try short ones: take at "
                f"least {_SHORTEST_TOKEN}, as of `openssl rand -hex 32`, or leave it out"
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
        """How many connections were turned away, and why the last one was; "" where none was."""
        return str(self._greetings.refusals)

    def receive(self, count: int, processes: NodeProcesses, wait: StartWait) -> list[tuple[Node, AuthenticatedChannel]]:
        """Wait until ``count`` nodes are here; return each with its channel, in their order. Then no more are accepted.

        Raises:
            LaunchError: not all came, or one cannot take part.
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
        """Accept no more nodes, and send those away that are here and were not received."""
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
