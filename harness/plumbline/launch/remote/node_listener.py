"""Accepts the nodes of a launcher in parallel. They prove that they know the token, and describe themselves.

The local processes that start the nodes' servers end together with the servers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from plumbline.core.errors import LaunchError
from plumbline.launch.remote.node_checks import Node, why_not
from plumbline.launch.start_wait import StartWait, cpu_seconds
from plumbline.worker.authenticated_channel import (
    GREETING_TIMEOUT_S,
    LAUNCHER,
    AuthenticatedChannel,
    ChannelError,
    LauncherGreeting,
)
from plumbline.worker.node_server import TOKEN, enable_keepalive

MOST_GREETINGS = 256
"""Largest number of unfinished greetings. A further connection ends the oldest. More open files are allowed."""

_CHUNK = 1 << 13


@dataclass
class _Waiting:
    greeting: LauncherGreeting
    place: str
    deadline: float


FAREWELL = b'{"command": "end"}'
"""The command that ends a server for good."""

_SHORTEST_TOKEN = 16
_CHECK_INTERVAL_S = 0.2


class NodeListener:
    """Listens at ``place``, host and port, for nodes that know ``token`` (None: a random one), until ``close``.

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
            self._listener = socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(f"Plumbline cannot listen for its nodes at {place[0]}:{place[1]}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._joined: queue.SimpleQueue[tuple[Node, AuthenticatedChannel]] = queue.SimpleQueue()
        self._refused, self._last_refusal = 0, ""
        self._waiting: dict[socket.socket, _Waiting] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="plumbline-greetings", daemon=True)
        self._thread.start()
        self._open = True

    @property
    def refusals(self) -> str:
        """The number of rejected connections, and why the last one was rejected; "" if there is none."""
        connections = "connection was" if self._refused == 1 else "connections were"
        return (
            f"{self._refused} {connections} rejected, the last one from {self._last_refusal}" if self._refused else ""
        )

    def receive(self, count: int, processes: NodeProcesses, wait: StartWait) -> list[tuple[Node, AuthenticatedChannel]]:
        """Wait for ``count`` nodes, then accept no more. Return the nodes in order, each with its channel."""
        here: dict[int, tuple[Node, AuthenticatedChannel]] = {}
        try:
            while len(here) < count:
                try:
                    node, channel = self._joined.get(timeout=_CHECK_INTERVAL_S)
                except queue.Empty:
                    refused = f"; {self.refusals}" if self.refusals else ""
                    missing = f"{count - len(here)} of {count} nodes to connect to port {self.port}{refused}"
                    if processes.ended is None and wait.goes_on(missing):
                        continue
                    how = processes.ended or f"waited {wait.seconds:.0f} s"
                    raise LaunchError(
                        f"{len(here)} of {count} nodes connected; {how}{refused}: {processes.output}"
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
        self._wake.close()
        self._thread.join()
        while not self._joined.empty():
            _dismiss(self._joined.get()[1])

    def _serve(self) -> None:
        while True:
            # Wait a little longer, so that the deadline has passed afterwards.
            ends = next((waiting.deadline for waiting in self._waiting.values()), None)
            ready = self._selector.select(None if ends is None else max(0.0, ends - time.monotonic()) + 0.01)
            for key, _ in ready:
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._waiting:  # otherwise it was rejected in favour of a newer one
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            self._refuse_late(time.monotonic())

    def _accept(self) -> None:
        try:
            connection, place = self._listener.accept()
        except OSError:  # the connection has closed again, or this process has too many open files
            time.sleep(0.01)
            return
        connection.setblocking(False)
        waiting = _Waiting(LauncherGreeting(self.token), place[0], time.monotonic() + GREETING_TIMEOUT_S)
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
            node = Node.of(handshake.greeting, time.monotonic())
            connection.sendall(handshake.proof(LAUNCHER))
            enable_keepalive(connection)
            self._selector.unregister(connection)
            del self._waiting[connection]
            self._joined.put((node, AuthenticatedChannel(connection, handshake, LAUNCHER)))
        except (OSError, ValueError) as error:
            self._refuse(connection, str(error))

    def _refuse_late(self, now: float) -> None:
        for connection, waiting in list(self._waiting.items()):
            if waiting.deadline > now:
                return
            came = len(waiting.greeting.received)
            self._refuse(connection, f"it sent only {came} bytes of a greeting in {GREETING_TIMEOUT_S:g} s")

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self._refused += 1
        self._last_refusal = f"{self._waiting.pop(connection).place}: {reason}"
        self._selector.unregister(connection)
        connection.close()

    def _end(self) -> None:
        for connection in self._waiting:
            connection.close()
        for end in (self._listener, self._woken, self._selector):
            end.close()


def _dismiss(channel: AuthenticatedChannel) -> None:
    with contextlib.suppress(OSError):
        channel.send(FAREWELL)
    channel.close()


_END_TIMEOUT_S = 30.0
"""Time for the commands to end after SIGTERM, and after SIGKILL."""


class NodeProcesses:
    """Runs ``commands`` until their nodes have ended. If the user starts the nodes, there are no commands.

    Each command reads the secret ``told`` from standard input, which ssh encrypts. By default, ssh forwards no
    variables, and other users can see a command's arguments.

    Raises:
        LaunchError: A command cannot be run.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], told: str = "") -> None:
        self._errors = os.memfd_create("plumbline")
        self._running: list[subprocess.Popen[bytes]] = []
        self._open = True
        for command in commands:
            try:
                started = subprocess.Popen(
                    [*command],
                    stdin=subprocess.PIPE,
                    stdout=self._errors,
                    stderr=self._errors,
                    env=environment,
                    # Ctrl-C must reach this process alone, which then ends the nodes in order.
                    start_new_session=True,
                )
            except OSError as error:
                self.close(0)
                raise LaunchError(f"the nodes cannot be started: {error}") from error
            self._running.append(started)
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # reported later, when the node of this command does not connect
                started.stdin.write(told.encode())
                started.stdin.flush()
            with suppress(BrokenPipeError):
                started.stdin.close()

    @property
    def ended(self) -> str | None:
        """Which command has ended, and how; None if none has ended."""
        for process in self._running:
            if process.poll() is not None:
                return f"{_program(process)} ended with exit code {process.returncode}"
        return None

    @property
    def output(self) -> str:
        """The last output of the commands and their nodes. If there is none, a sentence about the commands."""
        size = os.fstat(self._errors).st_size
        printed = os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace").strip()
        if printed:
            return printed
        if not self._running:
            return "nodes are started by hand, and none has printed anything here"
        programs = ", ".join(f"{_program(process)} ({process.pid})" for process in self._running)
        return f"{programs} printed nothing and used {self.cpu_seconds():.1f} s of CPU time"

    def cpu_seconds(self) -> float:
        return cpu_seconds(process.pid for process in self._running)

    def wait_for_output(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and self.ended is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, grace: float) -> None:
        """Wait ``grace`` seconds for the commands to end, then end them."""
        if not self._open:
            return
        self._open = False
        self._wait(grace)
        for step in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._running:
                step(process)
            self._wait(_END_TIMEOUT_S)
        os.close(self._errors)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in list(self._running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                self._running.remove(process)


def _program(process: subprocess.Popen[bytes]) -> str:
    assert isinstance(process.args, list)
    return str(process.args[0])
