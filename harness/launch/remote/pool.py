"""A warm pool over several nodes: a fork server on each, which connects back to this process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from harness.core.cell import Cell
from harness.core.errors import LaunchError, SubjectError
from harness.launch.local.one_machine import ELASTIC
from harness.launch.pool import GRACE, SERVER_ENVIRONMENT, START_LIMIT, Pool, Running
from harness.launch.remote.node_checks import Node, cut_off, differing
from harness.launch.remote.node_listener import FAREWELL, NodeListener
from harness.launch.remote.node_processes import NodeProcesses
from harness.launch.server_events import event_of
from harness.worker.assignment import Assignment
from harness.worker.node_server import PATIENCE, SILENCE, TOKEN

WORKER = Path(harness.__file__).parent / "worker" / "__main__.py"
"""What a node runs. By its path, because the subject's environment need not have Plumbline."""

WAYS_LIMIT = 5.0
"""Seconds in which each node must reach every other, before the first cell."""

_CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
"""How a connection ends behind which nobody is left to end it."""


class RemotePool(Pool):
    """Launches ranks of one subject on ``nodes`` nodes, a node's ranks where the node is.

    ``starter`` makes, of the port that this process listens on, the commands that start ``WORKER`` on every node, and
    end when it has ended; none, where somebody else starts the nodes. ``place`` is where this process listens, and
    ``token`` the secret by which nodes show that they are its own.
    """

    listens_on = ""

    def __init__(
        self,
        locator: str,
        nodes: int,
        starter: Callable[[int], Sequence[Sequence[str]]],
        place: tuple[str, int] = ("", 0),
        token: str | None = None,
    ) -> None:
        self.locator = locator
        self._count = nodes
        self._nodes: dict[int, Node] = {}
        self._lines: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._queue: list[dict[str, Any]] = []
        self._launches = 0
        self._launched: dict[int, set[int]] = {}
        self._subjects: list[dict[str, Any]] | None = None
        self._broken = False
        self._reception = NodeListener(place, token)
        self.token = self._reception.token
        environment = {**os.environ, **SERVER_ENVIRONMENT, TOKEN: self.token}
        try:
            self._starters = NodeProcesses(starter(self._reception.port), environment)
        except LaunchError:
            self._reception.close()
            raise

    @property
    def subjects(self) -> list[dict[str, Any]]:
        """What the subjects behind the locator declare; waits for every node to be warm.

        Raises:
            SubjectError: the locator names none, or it cannot be imported on a node.
            LaunchError: a node did not come up, cannot take part, or cannot reach another.
        """
        if self._subjects is None:
            try:
                self._subjects = self._warm(time.monotonic() + START_LIMIT)
            except BaseException:
                self.close()
                raise
        return self._subjects

    def settle(self) -> None:
        """Wait until every node's server only waits for commands."""
        assert self.subjects
        self._send({"command": "port"})
        self._answers("port", time.monotonic() + START_LIMIT, "does not answer")

    def _warm(self, deadline: float) -> list[dict[str, Any]]:
        for number, (node, line) in enumerate(self._reception.receive(self._count, self._starters, deadline)):
            self._nodes[number], self._lines[number], self._rests[number] = node, line, b""
        ready = self._answers("ready", deadline, f"did not import {self.locator} in {START_LIMIT:.0f} s")
        for number, said in ready.items():
            if said["subjects"] != ready[0]["subjects"]:
                first, other = self._nodes[0].host, self._nodes[number].host
                raise SubjectError(
                    f"--subject {self.locator} is not the same on {first} and {other}: are the checkout and the "
                    "environment on a file system that both see?"
                )
            self._nodes[number] = replace(self._nodes[number], software=said)
        if reason := differing(self.nodes):
            raise LaunchError(reason)
        if self._count > 1:
            self._call_roll()
        return list(ready[0]["subjects"])

    def _call_roll(self) -> None:
        """See to it that every node can reach every other, as their ranks will have to.

        Raises:
            LaunchError: one cannot.
        """
        deadline = time.monotonic() + START_LIMIT
        for number in self._lines:
            self._write(number, {"command": "listen", "address": self._nodes[number].address})
        ports = {number: said["port"] for number, said in self._answers("listens", deadline, "does not answer").items()}
        for number in self._lines:
            peers = {str(other): (self._nodes[other].address, port) for other, port in ports.items() if other != number}
            self._write(number, {"command": "reach", "peers": peers, "seconds": WAYS_LIMIT})
        answers = self._answers("reached", deadline, "does not answer")
        failed = [(who, int(whom), why) for who, said in answers.items() for whom, why in said["failed"].items()]
        if reason := cut_off(self._nodes, failed):
            raise LaunchError(reason)

    def _answers(self, kind: str, deadline: float, otherwise: str) -> dict[int, dict[str, Any]]:
        """Return what each node answers."""
        said: dict[int, dict[str, Any]] = {}
        while len(said) < self._count:
            event = self._next(deadline)
            if event is None:
                late = ", ".join(node.host for number, node in self._nodes.items() if number not in said)
                raise LaunchError(f"{late} {otherwise}: {self._starters.said}")
            if event["event"] == "refused":
                host = self._nodes[event["node"]].host
                raise SubjectError(f"--subject {self.locator}: on {host}: {event['message'].strip()}")
            if event["event"] == kind:
                said[event["node"]] = event
        return said

    @property
    def alive(self) -> bool:
        """Whether every node's server is still there."""
        return not self._broken and self._starters.ended is None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in their order."""
        return tuple(self._nodes[number] for number in range(self._count))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes, in their order; waits for them to be warm."""
        assert self.subjects
        return tuple(node.host for node in self.nodes)

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return how a rank of ``cell`` on its node reaches the others.

        They meet at the launcher, by the address under which their node found it; gloo listens on the interface that
        leads there, unless the user named one.
        """
        assert self.subjects
        node = self._nodes[rank // cell.contract.processes_per_node(cell.topology)]
        return {**ELASTIC, "MASTER_ADDR": node.launcher, "GLOO_SOCKET_IFNAME": node.interface}

    def meeting_point(self) -> dict[str, str]:
        """Return where ranks meet that a subject starts by itself: on the first node, for it is there that they listen.

        Raises:
            LaunchError: it is gone.
        """
        assert self.subjects
        self._write(0, {"command": "port"})
        event = None
        while event is None or event["event"] != "port":
            event = self._next(time.monotonic() + PATIENCE)
            if event is None:
                raise self._lost(0, "it does not answer")
        return {"MASTER_ADDR": self._nodes[0].address, "MASTER_PORT": str(event["port"])}

    def begin(self, subject: str, assignments: Sequence[Assignment], time_limit: float) -> Running:
        """Begin one launch, as every pool does.

        Raises:
            LaunchError: a node's server is gone.
        """
        self._launched = {number: {a.rank for a in assignments if a.node_rank == number} for number in self._nodes}
        return super().begin(subject, assignments, time_limit)

    def close(self) -> None:
        """End every node's server, with all of its ranks, and what started them.

        Where one is lost the others are left without a farewell: what started them by hand may start them again.
        """
        self._reception.close()
        for number in list(self._lines):
            with contextlib.suppress(OSError):
                if not self._broken:
                    self._lines[number].sendall(FAREWELL)
            self._lines.pop(number).close()
        self._launched = {}
        self._broken = True
        # The servers end by themselves when they are left alone; where none ever came, nobody will.
        self._starters.close(GRACE if self._subjects is not None else 0)

    def _send(self, command: dict[str, Any]) -> None:
        for number in list(self._lines):
            mine = command
            if command["command"] == "launch":
                here = [values for values in command["assignments"] if values["rank"] in self._launched[number]]
                mine = {**command, "assignments": here}
            self._write(number, mine)

    def _write(self, number: int, command: dict[str, Any]) -> None:
        try:
            self._lines[number].sendall(json.dumps(command).encode() + b"\n")
        except OSError as error:
            self._fail(number, error)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event of any node, or None when the deadline passes."""
        while not self._queue:
            with selectors.DefaultSelector() as selector:
                for number, line in self._lines.items():
                    selector.register(line, selectors.EVENT_READ, number)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                self._read(key.data)
        return self._queue.pop(0)

    def _read(self, number: int) -> None:
        try:
            chunk = self._lines[number].recv(1 << 16)
        except OSError as error:
            self._fail(number, error)
            return
        if not chunk:
            raise self._lost(number, "it is gone")
        *whole, self._rests[number] = (self._rests[number] + chunk).split(b"\n")
        for line in whole:
            try:
                event = event_of(line)
            except ValueError as error:
                raise self._lost(number, f"it talks nonsense ({error})") from error
            if event["event"] == "exit":
                self._launched.get(number, set()).discard(event["rank"])
            self._queue.append({**event, "node": number, "at": event["at"] + self._nodes[number].ahead})

    def _fail(self, number: int, error: OSError) -> None:
        """Make of a broken connection the ends of the ranks behind it, where the network was cut while they trained.

        Raises:
            LaunchError: there were none, or it is no network that was cut.
        """
        if error.errno not in _CUT or not self._launched.get(number):
            raise self._lost(number, str(error)) from error
        why = (
            f"its node {self._nodes[number].place} has been silent for {SILENCE} s: is its network cut, or is it down?"
        )
        left = {"code": None, "steps": None, "evidence": False, "out_of_memory": False}
        for rank in sorted(self._launched.pop(number)):
            event = {"event": "exit", "launch": self._launches, "rank": rank, **left, "silent": why}
            self._queue.append({**event, "node": number, "at": time.monotonic()})
        self._broken = True
        self._lines.pop(number).close()

    def _lost(self, number: int, why: str) -> LaunchError:
        self._lines.pop(number).close()
        self._broken = True
        self._starters.wait_for_words(GRACE)
        host = self._nodes[number].host
        return LaunchError(f"the fork server of {self.locator} on {host}: {why}: {self._starters.said}")
