"""A warm pool: a subject's fork server, which starts fresh ranks for each launch within milliseconds.

A launcher makes the pools of a session.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import plumbline
from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, SubjectError
from plumbline.launch import this_machine
from plumbline.launch.launch_progress import (
    EXIT_GRACE_S,
    LaunchedRankEnd,
    LaunchProgress,
    NoEventError,
    RunningLaunch,
    contents_of,
    event_of,
)
from plumbline.launch.start_wait import START_TIMEOUT_S, Notify, StartWait, cpu_seconds, ignore
from plumbline.worker.assignment import Assignment
from plumbline.worker.processes import KILL_TIMEOUT_S, TAG, end_tagged

SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    **this_machine.QUICK_RESOLVER,
    # CUDA does not survive a fork. With this variable, torch.cuda.is_available() does not initialise CUDA, so libraries
    # can call it when they are imported.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

WORKER = Path(plumbline.__file__).parent / "worker" / "__main__.py"
"""The program of a fork server. It is run by its path, because the subject's environment may not have Plumbline."""


class ServerNotStartedError(Exception):
    """A fork server ended or sent an invalid message before its first event."""


class Pool:
    """Launches ranks of one subject. Create it early: it warms up in the background."""

    @property
    def listens_on(self) -> str:
        """The address at which this process serves the ranks' rendezvous store."""
        return this_machine.loopback()

    def __init__(self, locator: str, python: str | None = None, notify: Notify = ignore) -> None:
        self.locator = locator
        self._python = python or sys.executable
        self._errors = os.memfd_create("plumbline") if hasattr(os, "memfd_create") else None
        self._tag = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [self._python, str(WORKER), locator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **SERVER_ENVIRONMENT, TAG: self._tag},
        )
        assert self._process.stdout is not None
        self._events = self._process.stdout.fileno()
        self._notify = notify
        self._rest = b""
        self._queue: list[dict[str, Any]] = []
        self._launches = 0
        self._subjects: list[dict[str, Any]] | None = None

    @property
    def subjects(self) -> list[dict[str, Any]]:
        """The declarations of the subjects that the locator names. Waits until the server is warm."""
        if self._subjects is None:
            try:
                event = self._first_event()
            except ServerNotStartedError as error:
                reason = self._stderr_tail().strip() or str(error)
                self.close()
                raise SubjectError(f"--subject {self.locator}: {reason}") from None
            if event["event"] != "ready":
                self.close()
                raise SubjectError(f"--subject {self.locator}: {event['message'].strip()}")
            self._subjects = event["subjects"]
        return self._subjects

    def _first_event(self) -> dict[str, Any]:
        wait = StartWait(self._cpu_seconds, self._notify)
        while (event := self._next(wait.next_check)) is None:
            if not wait.goes_on(f"{self._python} to import {self.locator}"):
                raise ServerNotStartedError(
                    f"{self._python} did not finish the import in {wait.seconds:.0f} s (CPU time used: "
                    f"{self._cpu_seconds():.0f} s)"
                )
        return event

    def import_workloads(self, locators: Sequence[str]) -> dict[str, dict[str, str]]:
        """Import the user's workloads into the fork server.

        Returns:
            For each host or interpreter, a fingerprint of each workload's weights and data, by name.
        """
        assert self.subjects
        self._send({"command": "workloads", "locators": [*locators]})
        wait = StartWait(self._cpu_seconds, self._notify)
        while (event := self._next(wait.next_check)) is None or event["event"] != "workloads":
            if event is None and not wait.goes_on(f"{self._python} to import {', '.join(locators)}"):
                raise self._lost("does not answer")
        return {self._python: contents_of(event, self._python)}

    def wait_until_idle(self) -> None:
        """Wait until the server has nothing left to do, so that it does not disturb measurements."""
        self._free_port()  # the server answers commands in order

    def _free_port(self) -> int:
        assert self.subjects
        self._send({"command": "port"})
        deadline = time.monotonic() + START_TIMEOUT_S
        while (event := self._next(deadline)) is not None:
            if event["event"] == "port":
                return int(event["port"])
        raise self._lost("does not answer")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def server(self) -> int:
        return self._process.pid

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return launcher-specific environment variables of a rank, in addition to torchrun's."""
        local = this_machine.local_variables(this_machine.loopback())
        return local | this_machine.own_devices(cell, rank, oversubscribe)

    def meeting_point(self) -> dict[str, str]:
        """Return torchrun's variables for the rendezvous of ranks that a subject starts itself."""
        return {"MASTER_ADDR": this_machine.loopback(), "MASTER_PORT": str(self._free_port())}

    def next_launch(self) -> int:
        self._launches += 1
        return self._launches

    def begin(self, subject: str, assignments: Sequence[Assignment], time_limit: float) -> RunningLaunch:
        """Begin a launch in the background. A pool runs one launch at a time.

        Raises:
            LaunchError: The server is gone.
        """
        assert self.subjects
        self._send({"command": "launch", "subject": subject, "assignments": [a.to_json() for a in assignments]})
        started = time.monotonic()
        ranks = tuple(assignment.rank for assignment in assignments)
        first = assignments[0]
        per_process = first.processes_per_node if first.whole_node else 0
        return RunningLaunch(first.launch, ranks, started, started + time_limit, per_process)

    def finish(self, running: RunningLaunch) -> list[LaunchedRankEnd]:
        """Wait for the end of a launch, and return how each rank ended.

        At the deadline, ranks are asked for their stacks and for the evidence that they have so far, and then killed.

        Raises:
            LaunchError: The server is gone.
        """
        progress = LaunchProgress(running)
        while not progress.is_complete:
            event = self._next(progress.deadline)
            if event is None:
                self._send({"command": "signal", "launch": running.number, "signal": int(progress.escalate())})
            elif event.get("launch") == running.number:
                progress.update(event)
        return progress.ends

    def kill_ranks(self) -> None:
        """Kill the ranks of the launch in progress. ``finish`` then returns in the thread that called it."""
        self._send({"command": "signal", "launch": self._launches, "signal": int(signal.SIGKILL)})

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=KILL_TIMEOUT_S + EXIT_GRACE_S)  # the server ends its descendants first
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            end_tagged(self._tag)  # a server that was killed has not ended its descendants
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._errors is not None:
            os.close(self._errors)
            self._errors = None

    def _cpu_seconds(self) -> float:
        return cpu_seconds([self._process.pid])

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._lost("has ended") from error

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while not self._queue:
            with selectors.DefaultSelector() as selector:
                selector.register(self._events, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                if self._subjects is None:
                    raise ServerNotStartedError(
                        f"its interpreter, {self._python}, ended at once: check that it is Python"
                    )
                raise self._lost("died")
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            try:
                self._queue.extend(map(event_of, whole))
            except NoEventError as error:
                if self._subjects is None:
                    raise ServerNotStartedError(f"its interpreter, {self._python}, is not Python: {error}") from error
                raise self._lost(f"sent an invalid message ({error})") from error
        return self._queue.pop(0)

    def _lost(self, how: str) -> LaunchError:
        try:
            self._process.wait(timeout=1)
            how = f"{how}, with exit code {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_tagged(self._tag)
        return LaunchError(f"the fork server of {self.locator} {how}: {self._stderr_tail().strip()}".rstrip(": "))

    def _stderr_tail(self) -> str:
        if self._errors is None:
            return ""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace")


@dataclass(frozen=True)
class LauncherOptions:
    """The options of launchers.

    ``nodes`` is the largest number of nodes of any cell. ``gpus`` is the largest number of devices per node, and
    ``devices`` is how many physical devices these need; both are 0 if no cell will be launched. ``subjects`` is the
    number of pools. ``rendezvous``, ``node_command`` and ``listen`` are options of the command line. ``notify`` shows
    the user a message at once.
    """

    nodes: int = 1
    gpus: int = 1
    devices: int = 0
    subjects: int = 1
    rendezvous: str | None = None
    node_command: str | None = None
    listen: str | None = None
    notify: Callable[[str], None] = print


class Launcher(ABC):
    """Makes the pools of a session. The constructor raises ``PlanError`` if the launcher cannot work here.

    ``nodes`` is the number of nodes, None if there are as many as a cell needs. If it is a number, all nodes see the
    folder of the evidence. ``machines`` is the number of machines that the nodes run on, each with its own devices.
    ``own_options`` are the optional fields of ``LauncherOptions`` that this launcher reads.
    """

    own_options: ClassVar[frozenset[str]] = frozenset()
    nodes: int | None = None
    machines: int = 1

    def __init__(self, options: LauncherOptions) -> None:
        self._notify = options.notify

    @abstractmethod
    def pool(self, locator: str, python: str | None) -> Pool:
        """Start a pool for the subjects behind ``locator``, in the interpreter ``python`` or this one."""


class LocalLauncher(Launcher):
    """Simulates the nodes on this machine and divides its devices among them."""

    def pool(self, locator: str, python: str | None) -> Pool:
        return Pool(locator, python, self._notify)
