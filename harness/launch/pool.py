"""A warm pool: one fork server for a subject, from which each launch gets fresh ranks within milliseconds."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness.core.cell import Cell
from harness.core.errors import LaunchError, SubjectError
from harness.launch.child_processes import PATIENCE, ChildEnd, Children
from harness.launch.local import one_machine
from harness.launch.process_tags import MARK, end_marked
from harness.launch.server_events import NoEventError, event_of
from harness.worker import descendants
from harness.worker.assignment import Assignment
from harness.worker.connectivity import free_port

START_LIMIT = 300.0
"""Seconds for importing torch and the subject's library, on a machine that has other things to do."""

GRACE = 3.0
"""Seconds that ranks get to notice that one of them is gone, to end once their evidence is there, and to answer when
they are late: to write the evidence that they have so far."""

STACKS_TIME = 0.5
"""Seconds that ranks get to write down their stacks before they are ended."""

SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # torch's TCPStore looks up the name of the address it connected to. Dozens of ranks that ask a DNS server at
    # once lose some answers and wait for the default time-out, 5 s each; nobody needs the name.
    "RES_OPTIONS": "timeout:1 attempts:1",
    # CUDA does not survive a fork. With this, torch.cuda.is_available() counts devices without starting it, so a
    # library may ask when it is imported.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

_BOOTSTRAP = """
import importlib.util, sys
# Only this package, by its place: the folder around it may be another environment's site-packages.
spec = importlib.util.spec_from_file_location("harness", sys.argv[1], submodule_search_locations=[sys.argv[2]])
module = importlib.util.module_from_spec(spec)
sys.modules["harness"] = module
spec.loader.exec_module(module)
sys.argv = sys.argv[2:]
from harness.worker.server import main
main()
"""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. ``code`` is negative for a signal; None if it had to be ended for being late.

    ``unwritten`` says why its evidence could not be written, and ``silent`` why nothing was heard of it any more, None
    where that was not the matter.
    ``steps`` is how many it had done, as far as it is known. ``limit_reached``: it was ended because the launch took
    too long; else because others were gone. ``stopped``: it was found stopped by a signal. ``children`` are the
    processes that the subject started by itself, in the order in which they ended, and ``raised`` says that its call,
    above them, raised.
    """

    rank: int
    evidence: bool
    code: int | None
    seconds: float
    steps: int | None = None
    limit_reached: bool = False
    stopped: bool = False
    out_of_memory: bool = False
    unwritten: str | None = None
    silent: str | None = None
    raised: bool = False
    children: tuple[ChildEnd, ...] = ()


@dataclass(frozen=True)
class Running:
    """A launch that has begun. Times are of the monotonic clock.

    ``below`` is how many ranks each of ``ranks`` stands for, where the subject starts them by itself.
    """

    number: int
    ranks: tuple[int, ...]
    started: float
    deadline: float
    below: int = 0


class Pool:
    """Launches ranks of one subject. Start it early: it warms up while the caller does something else."""

    @property
    def listens_on(self) -> str:
        """Where this process listens for ranks that want to meet."""
        return one_machine.loopback()

    def __init__(self, locator: str, python: str | None = None) -> None:
        self.locator = locator
        package = Path(harness.__file__)
        self._errors = os.memfd_create("plumbline") if hasattr(os, "memfd_create") else None
        self._mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", _BOOTSTRAP, str(package), str(package.parent), locator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **SERVER_ENVIRONMENT, MARK: self._mark},
        )
        assert self._process.stdout is not None
        self._events = self._process.stdout.fileno()
        self._rest = b""
        self._queue: list[dict[str, Any]] = []
        self._launches = 0
        self._subjects: list[dict[str, Any]] | None = None

    @property
    def subjects(self) -> list[dict[str, Any]]:
        """What the subjects behind the locator declare; waits for the server to be warm.

        Raises:
            SubjectError: the locator names none, or it cannot be imported.
        """
        if self._subjects is None:
            event = self._next(time.monotonic() + START_LIMIT)
            if event is None or event["event"] != "ready":
                said = event["message"] if event else self._stderr_tail()
                self.close()
                silent = f"its interpreter, {self._process.args[0]}, ended at once: is it Python?"
                raise SubjectError(f"--subject {self.locator}: {said.strip() or silent}")
            self._subjects = event["subjects"]
        return self._subjects

    def settle(self) -> None:
        """Wait until the server only waits for commands, and takes no more time from whatever is to be measured.

        Raises:
            SubjectError: as ``subjects``.
            LaunchError: the server is gone.
        """
        assert self.subjects
        self._send({"command": "port"})  # it answers in turn
        deadline = time.monotonic() + START_LIMIT
        while (event := self._next(deadline)) is not None:
            if event["event"] == "port":
                return
        raise self._lost("does not answer")

    @property
    def alive(self) -> bool:
        """Whether the server is still there."""
        return self._process.poll() is None

    @property
    def server(self) -> int:
        """The server's process id."""
        return self._process.pid

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return the environment that a rank of ``cell`` needs where it lives, beside torchrun's for every place."""
        return one_machine.variables(cell, rank, oversubscribe)

    def meeting_point(self) -> dict[str, str]:
        """Return where the ranks of a launch meet that a subject starts by itself, in torchrun's variables."""
        return {"MASTER_ADDR": one_machine.loopback(), "MASTER_PORT": str(free_port())}

    def next_launch(self) -> int:
        """Return a number for a launch, its own in this pool."""
        self._launches += 1
        return self._launches

    def begin(self, subject: str, assignments: Sequence[Assignment], time_limit: float) -> Running:
        """Begin one launch; it goes on while the caller does something else. One launch at a time.

        Raises:
            LaunchError: the server itself is gone.
        """
        assert self.subjects
        self._send({"command": "launch", "subject": subject, "assignments": [a.to_json() for a in assignments]})
        started = time.monotonic()
        ranks = tuple(assignment.rank for assignment in assignments)
        below = assignments[0].processes_per_node if assignments[0].whole_node else 0
        return Running(assignments[0].launch, ranks, started, started + time_limit, below)

    def finish(self, running: Running) -> list[RankEnd]:
        """Follow a launch to its end and say how each rank ended, soon after its deadline at the latest.

        A rank has ended well when its evidence is complete in time; one that then hangs on its way out is ended. A rank
        that is late is asked to write what it has recorded so far.

        Raises:
            LaunchError: the server itself is gone.
        """
        waiting = set(running.ranks)
        evidence: set[int] = set()
        answered: set[int] = set()
        children = Children(running.below)
        late: dict[int, dict[str, Any]] = {}
        unwritten: dict[int, str] = {}
        limit_reached = False
        ends: dict[int, RankEnd] = {}
        deadline = running.deadline
        stage = 0
        while waiting:
            event = self._next(deadline)
            if event is None:
                # First ask for the stacks and for the evidence so far, then make an end of it.
                limit_reached = limit_reached or deadline == running.deadline
                self._send({"command": "signal", "launch": running.number, "signal": _ENDINGS[stage]})
                patience = GRACE if limit_reached else STACKS_TIME
                deadline = time.monotonic() + (patience if stage == 0 else START_LIMIT)
                stage = min(stage + 1, len(_ENDINGS) - 1)
                continue
            if event.get("launch") != running.number:
                continue
            rank = event["rank"]
            children.hear(event, late=bool(stage))
            if event["event"] == "late":
                late[rank] = event
            if stage and event["event"] == "so_far":
                answered.add(rank)
                if answered >= waiting:
                    deadline = min(deadline, time.monotonic() + STACKS_TIME)
            if event["event"] == "unwritten":
                unwritten[rank] = event["why"]
            if not stage and (event["event"] == "evidence" or event.get("evidence")):
                evidence.add(rank)
            if event["event"] == "exit":
                waiting.discard(rank)
                ends[rank] = RankEnd(
                    rank,
                    evidence=rank in evidence,
                    code=None if stage else event["code"],
                    seconds=event["at"] - running.started,
                    steps=late.get(rank, event)["steps"],
                    limit_reached=limit_reached,
                    stopped=rank in late and late[rank]["stopped"],
                    out_of_memory=event["out_of_memory"],
                    unwritten=unwritten.get(rank),
                    silent=event.get("silent"),
                    raised=children.above_raised(rank),
                    children=children.of(rank),
                )
            gone = event["event"] == "exit" and (event["code"] or rank not in evidence)
            if not stage and (gone or evidence >= waiting):
                # Somebody is gone for a bad reason, or all that is left to do is to end.
                deadline = min(deadline, time.monotonic() + GRACE)
            elif not stage and children.leave_nothing_to_do(waiting):
                deadline = min(deadline, time.monotonic() + PATIENCE)
        return [ends[rank] for rank in running.ranks]

    def close(self) -> None:
        """End the server and every rank of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=descendants.PATIENCE + GRACE)  # it ends whoever is below it first
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            end_marked(self._mark)  # a server that was killed ended nobody
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._errors is not None:
            os.close(self._errors)
            self._errors = None

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._lost("is gone") from error

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next event, or None when the deadline passes or, before the first event, the server ends."""
        while not self._queue:
            with selectors.DefaultSelector() as selector:
                selector.register(self._events, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                if self._subjects is None:
                    return None
                raise self._lost("died")
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            try:
                self._queue.extend(map(event_of, whole))
            except NoEventError as error:
                if self._subjects is None:
                    return None  # what was started is no Python, or not ours
                raise self._lost(f"talks nonsense ({error})") from error
        return self._queue.pop(0)

    def _lost(self, how: str) -> LaunchError:
        """Make an end of a server that is of no use any more, with all that it started; return what to say of it."""
        try:
            self._process.wait(timeout=1)
            how = f"{how}, with exit code {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_marked(self._mark)
        return LaunchError(f"the fork server of {self.locator} {how}: {self._stderr_tail().strip()}".rstrip(": "))

    def _stderr_tail(self) -> str:
        if self._errors is None:
            return ""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace")


_ENDINGS = (int(signal.SIGUSR1), int(signal.SIGKILL))
