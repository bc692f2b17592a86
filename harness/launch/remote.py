"""A warm pool over several nodes: a fork server on each, which connects back to this process."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness.core.cell import Cell
from harness.core.errors import LaunchError, SubjectError
from harness.launch.pool import GRACE, SERVER_ENVIRONMENT, START_LIMIT, Pool
from harness.worker.node import PATIENCE, TOKEN

WORKER = Path(harness.__file__).parent / "worker" / "__main__.py"
"""What a node runs. By its path, because the subject's environment need not have Plumbline."""

_LONGEST_HELLO = 4096


@dataclass
class Node:
    """One node's connection. ``ahead`` is how far this process' monotonic clock is ahead of the node's, in seconds."""

    connection: socket.socket
    host: str
    launcher: str
    interface: str
    ahead: float
    rest: bytes = b""


class RemotePool(Pool):
    """Launches ranks of one subject on ``nodes`` nodes, a node's ranks where the node is.

    ``starter`` makes, of the port that this process listens on, the command that starts ``WORKER`` on every node
    and ends when they have ended.
    """

    listens_on = ""

    def __init__(self, locator: str, nodes: int, starter: Callable[[int], Sequence[str]]) -> None:
        self.locator = locator
        self._count = nodes
        self._nodes: dict[int, Node] = {}
        self._queue: list[dict[str, Any]] = []
        self._launches = 0
        self._subjects: list[dict[str, Any]] | None = None
        self._broken = False
        self._token = secrets.token_hex(32)
        self._listener = socket.create_server(("", 0), backlog=max(128, nodes))
        self._errors = os.memfd_create("plumbline")
        try:
            self._starter = subprocess.Popen(
                [*starter(self._listener.getsockname()[1])],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env={**os.environ, **SERVER_ENVIRONMENT, TOKEN: self._token},
                # Ctrl-C is for this process, which ends the nodes in order.
                start_new_session=True,
            )
        except OSError as error:
            self._listener.close()
            os.close(self._errors)
            raise LaunchError(f"the nodes cannot be started: {error}") from error

    @property
    def subjects(self) -> list[dict[str, Any]]:
        """What the subjects behind the locator declare; waits for every node to be warm.

        Raises:
            SubjectError: the locator names none, or it cannot be imported on a node.
            LaunchError: a node did not come up.
        """
        if self._subjects is None:
            try:
                self._subjects = self._warm(time.monotonic() + START_LIMIT)
            except BaseException:
                self.close()
                raise
        return self._subjects

    def _warm(self, deadline: float) -> list[dict[str, Any]]:
        self._gather(deadline)
        said: dict[int, list[dict[str, Any]]] = {}
        while len(said) < self._count:
            event = self._next(deadline)
            if event is None:
                late = ", ".join(node.host for number, node in self._nodes.items() if number not in said)
                raise LaunchError(f"{late} did not import {self.locator} in {START_LIMIT:.0f} s: {self._said()}")
            if event["event"] == "refused":
                host = self._nodes[event["node"]].host
                raise SubjectError(f"--subject {self.locator}: on {host}: {event['message'].strip()}")
            said[event["node"]] = event["subjects"]
        for number, declared in said.items():
            if declared != said[0]:
                first, other = self._nodes[0].host, self._nodes[number].host
                raise SubjectError(
                    f"--subject {self.locator} is not the same on {first} and {other}: are the checkout and the "
                    "environment on a file system that both see?"
                )
        return said[0]

    def _gather(self, deadline: float) -> None:
        """Wait until every node has connected and shown the token."""
        while len(self._nodes) < self._count:
            # Looked at often enough to say at once that a starter ended before its nodes came.
            self._listener.settimeout(min(0.2, max(0.0, deadline - time.monotonic())) or 0.01)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                ended = self._starter.poll()
                if ended is None and time.monotonic() < deadline:
                    continue
                how = f"ended with exit code {ended}" if ended is not None else f"waited {START_LIMIT:.0f} s"
                raise LaunchError(
                    f"{len(self._nodes)} of {self._count} nodes came up; {self._starter.args[0]} {how}: {self._said()}"
                ) from None
            self._meet(connection)
        self._listener.close()

    def _meet(self, connection: socket.socket) -> None:
        """Take a node in if it shows the token; anybody else is sent away."""
        connection.settimeout(PATIENCE)
        line = b""
        try:
            while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
                byte = connection.recv(1)
                if not byte:
                    break
                line += byte
            hello = json.loads(line)
            known = hmac.compare_digest(str(hello["token"]), self._token)
        except (OSError, ValueError, LookupError, TypeError):
            known = False
        if not known:
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            # A node that vanished says no farewell.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        ahead = time.monotonic() - hello["at"]
        self._nodes[hello["node"]] = Node(connection, hello["host"], hello["launcher"], hello["interface"], ahead)

    @property
    def alive(self) -> bool:
        """Whether every node's server is still there."""
        return not self._broken and self._starter.poll() is None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes, in their order; waits for them to be warm."""
        assert self.subjects
        return tuple(self._nodes[number].host for number in range(self._count))

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return how a rank of ``cell`` on its node reaches the others.

        They meet at the launcher, by the address under which their node found it; gloo listens on the interface that
        leads there, unless the user named one.
        """
        assert self.subjects
        node = self._nodes[rank // cell.contract.processes_per_node(cell.topology)]
        gloo = os.environ.get("GLOO_SOCKET_IFNAME") or node.interface
        return {"MASTER_ADDR": node.launcher, "GLOO_SOCKET_IFNAME": gloo}

    def close(self) -> None:
        """End every node's server, with all of its ranks, and what started them."""
        self._listener.close()
        for node in self._nodes.values():
            node.connection.close()
        self._nodes.clear()
        if self._errors is None:
            return
        try:
            # The servers end by themselves when they are left alone; where none ever came, nobody will.
            self._starter.wait(timeout=GRACE if self._subjects is not None else 0)
        except subprocess.TimeoutExpired:
            self._starter.terminate()
            try:
                self._starter.wait(timeout=10 * GRACE)
            except subprocess.TimeoutExpired:
                self._starter.kill()
                self._starter.wait()
        os.close(self._errors)
        self._errors = None

    def _send(self, command: dict[str, Any]) -> None:
        for number, node in list(self._nodes.items()):
            mine = command
            if command["command"] == "launch":
                mine = {**command, "assignments": [v for v in command["assignments"] if self._place(v) == number]}
            try:
                node.connection.sendall(json.dumps(mine).encode() + b"\n")
            except OSError as error:
                raise self._lost(number, str(error)) from error

    @staticmethod
    def _place(assignment: dict[str, Any]) -> int:
        return int(assignment["environment"]["GROUP_RANK"])

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event of any node, or None when the deadline passes."""
        while not self._queue:
            with selectors.DefaultSelector() as selector:
                for number, node in self._nodes.items():
                    selector.register(node.connection, selectors.EVENT_READ, number)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                self._read(key.data)
        return self._queue.pop(0)

    def _read(self, number: int) -> None:
        node = self._nodes[number]
        try:
            chunk = node.connection.recv(1 << 16)
        except OSError as error:
            raise self._lost(number, str(error)) from error
        if not chunk:
            raise self._lost(number, "it is gone")
        *whole, node.rest = (node.rest + chunk).split(b"\n")
        for line in whole:
            try:
                event = json.loads(line)
            except ValueError as error:
                raise self._lost(number, f"it talks nonsense ({error})") from error
            self._queue.append({**event, "node": number, "at": event["at"] + node.ahead})

    def _lost(self, number: int, why: str) -> LaunchError:
        node = self._nodes.pop(number)
        node.connection.close()
        self._broken = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._starter.wait(timeout=GRACE)  # what it has to say of the node comes when it ends
        return LaunchError(f"the fork server of {self.locator} on {node.host}: {why}: {self._said()}")

    def _said(self) -> str:
        return self._stderr_tail().strip() or "it said nothing"
