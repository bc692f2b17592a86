"""A warm pool over several nodes. Each node's fork server connects back to this process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, SubjectError
from plumbline.launch.launch_progress import EXIT_GRACE_S, RunningLaunch, contents_of, event_of
from plumbline.launch.pool import SERVER_ENVIRONMENT, Pool
from plumbline.launch.remote.node_checks import Node, cut_off, differing, other_plumbline
from plumbline.launch.remote.node_listener import FAREWELL, NodeListener, NodeProcesses
from plumbline.launch.start_wait import Notify, StartWait, ignore
from plumbline.launch.this_machine import ELASTIC
from plumbline.worker.assignment import Assignment
from plumbline.worker.authenticated_channel import AuthenticatedChannel
from plumbline.worker.node_server import KEEPALIVE_TIMEOUT_S, TOKEN, package_hash
from plumbline.worker.scratch import Scratch

PROBE_TIMEOUT_S = 10.0
"""Time for each node to reach all others, before the first cell. It is enough for four attempts of the kernel."""

_CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
"""Errors of a connection whose peer disappeared without closing it."""


class RemotePool(Pool):
    """Launches ranks of one subject on ``nodes`` nodes.

    ``start_commands`` gets the port that this process listens on, and returns the commands that start the nodes' fork
    servers; there are none if the user starts the nodes. The commands end together with the servers. This process
    listens at ``place``, and shares the secret ``token`` (None: a random one) with its nodes. They read it from their
    environment or, with ``token_on_stdin``, from standard input. ``scratch`` is a folder of the commands, which is
    removed when the pool is closed.
    """

    def __init__(
        self,
        locator: str,
        nodes: int,
        start_commands: Callable[[int], Sequence[Sequence[str]]],
        place: tuple[str, int],
        token: str | None = None,
        notify: Notify = ignore,
        *,
        token_on_stdin: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self.locator = locator
        self._address = place[0]
        self._notify = notify
        self._count = nodes
        self._scratch = scratch
        self._nodes: dict[int, Node] = {}
        self._channels: dict[int, AuthenticatedChannel] = {}
        self._queue: list[dict[str, Any]] = []
        self._launches = 0
        self._launched: dict[int, set[int]] = {}
        self._subjects: list[dict[str, Any]] | None = None
        self._broken = False
        self._listener = NodeListener(place, token)
        self.token = self._listener.token
        environment = {**os.environ, **SERVER_ENVIRONMENT}
        told = f"{self.token}\n" if token_on_stdin else ""
        if not token_on_stdin:
            environment[TOKEN] = self.token
        try:
            self._processes = NodeProcesses(start_commands(self._listener.port), environment, told)
        except LaunchError:
            self._listener.close()
            raise

    @property
    def listens_on(self) -> str:
        """The address at which nodes reach this process, and ranks reach the rendezvous store."""
        return self._address

    @property
    def subjects(self) -> list[dict[str, Any]]:
        """The declarations of the subjects that the locator names. Waits until every node is warm."""
        if self._subjects is None:
            try:
                self._subjects = self._warm_up()
            except BaseException:
                self.close()
                raise
        return self._subjects

    def wait_until_idle(self) -> None:
        assert self.subjects
        self._send({"command": "port"})
        self._answers("port", "answer")

    def import_workloads(self, locators: Sequence[str]) -> dict[str, dict[str, str]]:
        assert self.subjects
        self._send({"command": "workloads", "locators": [*locators]})
        answers = self._answers("workloads", f"import {', '.join(locators)}")
        return {
            self._nodes[number].host: contents_of(event, self._nodes[number].host) for number, event in answers.items()
        }

    def _warm_up(self) -> list[dict[str, Any]]:
        wait = StartWait(self._processes.cpu_seconds, self._notify)
        for number, (node, channel) in enumerate(self._listener.receive(self._count, self._processes, wait)):
            self._nodes[number], self._channels[number] = node, channel
        ready = self._answers("ready", f"import {self.locator}")
        for number, event in ready.items():
            if event["subjects"] != ready[0]["subjects"]:
                first, other = self._nodes[0].host, self._nodes[number].host
                raise SubjectError(
                    f"--subject {self.locator} differs between {first} and {other}: the checkout and the environment "
                    "must be on a file system that both mount"
                )
            self._nodes[number] = replace(self._nodes[number], software=event)
        if reason := other_plumbline(self.nodes, package_hash()) or differing(self.nodes):
            raise LaunchError(reason)
        if self._count > 1:
            self._check_connectivity()
        return list(ready[0]["subjects"])

    def _check_connectivity(self) -> None:
        """Raise ``LaunchError`` if a node cannot reach another one. Their ranks will have to."""
        for number in self._channels:
            self._write(number, {"command": "listen", "address": self._nodes[number].address})
        ports = {number: event["port"] for number, event in self._answers("listens", "listen").items()}
        for number in self._channels:
            peers = {str(other): (self._nodes[other].address, port) for other, port in ports.items() if other != number}
            self._write(number, {"command": "reach", "peers": peers, "seconds": PROBE_TIMEOUT_S})
        answers = self._answers("reached", "reach the others")
        failed = [(who, int(whom), why) for who, event in answers.items() for whom, why in event["failed"].items()]
        if reason := cut_off(self._nodes, failed):
            raise LaunchError(reason)

    def _answers(self, kind: str, what: str) -> dict[int, dict[str, Any]]:
        wait = StartWait(self._processes.cpu_seconds, self._notify)
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self._count:
            event = self._next(wait.next_check)
            if event is None:
                late = ", ".join(node.host for number, node in self._nodes.items() if number not in answers)
                if wait.goes_on(f"{late} to {what}"):
                    continue
                raise LaunchError(f"{late} did not {what} in {wait.seconds:.0f} s: {self._processes.output}")
            wait.report_progress()
            if event["event"] == "refused":
                host = self._nodes[event["node"]].host
                raise SubjectError(f"--subject {self.locator}: on {host}: {event['message'].strip()}")
            if event["event"] == kind:
                answers[event["node"]] = event
        return answers

    @property
    def alive(self) -> bool:
        return not self._broken and self._processes.ended is None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes[number] for number in range(self._count))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names of the nodes. Waits until every node is warm."""
        assert self.subjects
        return tuple(node.host for node in self.nodes)

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return launcher-specific environment variables of a rank, in addition to torchrun's.

        Ranks meet at the launcher, at the address at which their node reached it. Gloo uses the interface that leads
        there, unless the user named another one.
        """
        assert self.subjects
        node = self._nodes[rank // cell.parallelism.processes_per_node(cell.topology)]
        return {**ELASTIC, "MASTER_ADDR": node.launcher, "GLOO_SOCKET_IFNAME": node.interface}

    def meeting_point(self) -> dict[str, str]:
        """Return torchrun's variables for ranks that a subject starts itself. They meet on the first node."""
        assert self.subjects
        self._write(0, {"command": "port"})
        wait = StartWait(self._processes.cpu_seconds, self._notify)
        while (event := self._next(wait.next_check)) is None or event["event"] != "port":
            if event is None and not wait.goes_on(f"{self._nodes[0].host} to name a free port"):
                raise self._lost_node(0, "it does not answer")
        return {"MASTER_ADDR": self._nodes[0].address, "MASTER_PORT": str(event["port"])}

    def begin(self, subject: str, assignments: Sequence[Assignment], time_limit: float) -> RunningLaunch:
        """Begin a launch, as every pool does.

        Raises:
            LaunchError: The server of a node is gone.
        """
        self._launched = {number: {a.rank for a in assignments if a.node_rank == number} for number in self._nodes}
        return super().begin(subject, assignments, time_limit)

    def close(self) -> None:
        """End the servers of all nodes with their ranks, and the commands that started them.

        If a server was lost, the other servers are not told to end for good, because a torchrun that the user started
        can restart them.
        """
        self._listener.close()
        if self._subjects is not None and self._listener.refusals and self._channels:
            self._notify(self._listener.refusals)
        for number in list(self._channels):
            with contextlib.suppress(OSError):
                if not self._broken:
                    self._channels[number].send(FAREWELL)
            self._channels.pop(number).close()
        self._launched = {}
        self._broken = True
        # Servers end when their connection closes. If the nodes were never warm, there is nothing to wait for.
        self._processes.close(EXIT_GRACE_S if self._subjects is not None else 0)
        if self._scratch is not None:
            self._scratch.leave(remove=True)
            self._scratch = None

    def _send(self, command: dict[str, Any]) -> None:
        for number in list(self._channels):
            mine = command
            if command["command"] == "launch":
                here = [values for values in command["assignments"] if values["rank"] in self._launched[number]]
                mine = {**command, "assignments": here}
            self._write(number, mine)

    def _write(self, number: int, command: dict[str, Any]) -> None:
        try:
            self._channels[number].send(json.dumps(command).encode())
        except OSError as error:
            self._fail(number, error)

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while not self._queue:
            with selectors.DefaultSelector() as selector:
                for number, channel in self._channels.items():
                    selector.register(channel, selectors.EVENT_READ, number)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                self._read(key.data)
        return self._queue.pop(0)

    def _read(self, number: int) -> None:
        try:
            messages = self._channels[number].receive()
        except OSError as error:
            self._fail(number, error)
            return
        if messages is None:
            raise self._lost_node(number, "it closed the connection")
        for message in messages:
            try:
                event = event_of(message)
            except ValueError as error:
                raise self._lost_node(number, f"it sent an invalid message ({error})") from error
            if event["event"] == "exit":
                self._launched.get(number, set()).discard(event["rank"])
            self._queue.append({**event, "node": number, "at": event["at"] + self._nodes[number].clock_offset})

    def _fail(self, number: int, error: OSError) -> None:
        """Report a node's ranks as ended if the network was cut while they trained; otherwise, the node is lost."""
        if error.errno not in _CUT or not self._launched.get(number):
            raise self._lost_node(number, str(error)) from error
        why = (
            f"its node {self._nodes[number].place} has been silent for {KEEPALIVE_TIMEOUT_S} s: "
            "check whether it or its network is down"
        )
        left = {"code": None, "steps": None, "evidence": False, "out_of_memory": False}
        for rank in sorted(self._launched.pop(number)):
            event = {"event": "exit", "launch": self._launches, "rank": rank, **left, "silent": why}
            self._queue.append({**event, "node": number, "at": time.monotonic()})
        self._broken = True
        self._channels.pop(number).close()

    def _lost_node(self, number: int, why: str) -> LaunchError:
        self._channels.pop(number).close()
        self._broken = True
        self._processes.wait_for_output(EXIT_GRACE_S)
        host = self._nodes[number].host
        return LaunchError(f"the fork server of {self.locator} on {host}: {why}: {self._processes.output}")
