"""Greets the nodes that connect to a launcher, in parallel, with limits on time and bytes; counts failed attempts."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from plumbline.launch.remote.node_checks import Node
from plumbline.worker.authenticated_channel import (
    GREETING_TIMEOUT_S,
    LAUNCHER,
    AuthenticatedChannel,
    ChannelError,
    Handshake,
    LauncherGreeting,
)
from plumbline.worker.node_server import enable_keepalive

MOST_GREETINGS = 256
"""Connections that are greeted at the same time. One more ends the oldest. A process may have more files open."""

_CHUNK = 1 << 13


@dataclass
class Refusals:
    """The number of rejected connections, and why the last one was rejected."""

    count: int = 0
    last: str = ""

    def add(self, place: str, reason: str) -> None:
        self.count += 1
        self.last = f"{place}: {reason}"

    def __str__(self) -> str:
        connections = "connection was" if self.count == 1 else "connections were"
        return f"{self.count} {connections} rejected, the last one from {self.last}" if self.count else ""


@dataclass
class _Waiting:
    greeting: LauncherGreeting
    place: str
    deadline: float


class Greetings:
    """Accepts connections at ``listener`` in a thread, until ``close``.

    ``joined`` receives each node that knows ``token``, with the channel to it.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.joined: queue.SimpleQueue[tuple[Node, AuthenticatedChannel]] = queue.SimpleQueue()
        self.refusals = Refusals()
        self._listener = listener
        self._token = token
        self._waiting: dict[socket.socket, _Waiting] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="plumbline-greetings", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listener, and connections whose greeting is not complete."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            # A little longer, so that the deadline has passed afterwards.
            ends = next((waiting.deadline for waiting in self._waiting.values()), None)
            ready = self._selector.select(None if ends is None else max(0.0, ends - time.monotonic()) + 0.01)
            for key, _ in ready:
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._waiting:  # otherwise it was rejected in favour of another one
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            self._refuse_late(time.monotonic())

    def _accept(self) -> None:
        try:
            connection, place = self._listener.accept()
        except OSError:  # it has closed again, or this process has too many open files
            time.sleep(0.01)
            return
        connection.setblocking(False)
        waiting = _Waiting(LauncherGreeting(self._token), place[0], time.monotonic() + GREETING_TIMEOUT_S)
        self._waiting[connection] = waiting
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.sendall(waiting.greeting.challenge)
        except OSError as error:
            self._refuse(connection, str(error))
        if len(self._waiting) > MOST_GREETINGS:
            self._refuse(next(iter(self._waiting)), f"more than {MOST_GREETINGS} connections at the same time")

    def _read(self, connection: socket.socket) -> None:
        try:
            chunk = connection.recv(_CHUNK)
            if not chunk:
                raise ChannelError("it closed the connection before its greeting was complete")
            handshake = self._waiting[connection].greeting.feed(chunk)
            if handshake is None:
                return
            self._welcome(connection, handshake)
        except (OSError, ValueError) as error:
            self._refuse(connection, str(error))

    def _welcome(self, connection: socket.socket, handshake: Handshake) -> None:
        node = Node.of(handshake.greeting, time.monotonic())
        connection.sendall(handshake.proof(LAUNCHER))
        enable_keepalive(connection)
        self._selector.unregister(connection)
        del self._waiting[connection]
        self.joined.put((node, AuthenticatedChannel(connection, handshake, LAUNCHER)))

    def _refuse_late(self, now: float) -> None:
        for connection, waiting in list(self._waiting.items()):
            if waiting.deadline > now:
                return
            came = len(waiting.greeting.received)
            self._refuse(connection, f"it sent only {came} bytes of a greeting in {GREETING_TIMEOUT_S:g} s")

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self.refusals.add(self._waiting.pop(connection).place, reason)
        self._selector.unregister(connection)
        connection.close()

    def _end(self) -> None:
        for connection in self._waiting:
            connection.close()
        for end in (self._listener, self._woken, self._selector):
            end.close()
