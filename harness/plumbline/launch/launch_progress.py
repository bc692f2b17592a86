"""The progress of a launch, from its fork servers' events: which ranks have ended, and when to signal the others.

``Pool.finish`` reads the events and sends the signals.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from plumbline.launch.child_processes import CHILD_EXIT_TIMEOUT_S, ChildEnd, Children

EXIT_GRACE_S = 3.0
"""Time for ranks to notice that another rank is gone, to end after their evidence is there and, at the time limit, to
write the evidence that they have so far."""

STACK_DUMP_TIME_S = 0.5
"""Time for ranks to write their stacks before they are killed."""

KILL_RETRY_S = 300.0
"""Time after which ranks are killed again if their end has not been reported."""


@dataclass(frozen=True)
class LaunchedRankEnd:
    """How one rank ended. ``code`` is negative for a signal, and None if the rank was late and had to be killed.

    ``unwritten`` says why its evidence could not be written, ``silent`` why its node stopped answering. ``steps`` is
    the number of completed steps, if known. ``limit_reached``: it was killed at the time limit, rather than because
    other ranks were gone. ``stopped``: a signal had stopped it. ``children`` are the processes that the subject
    started, in the order of their ends; ``raised`` says that the subject's call raised.
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
class RunningLaunch:
    """A launch that has begun. Times are in seconds, on the monotonic clock.

    If the subject starts its ranks, ``ranks_per_process`` is how many each of ``ranks`` starts, else 0.
    """

    number: int
    ranks: tuple[int, ...]
    started: float
    deadline: float
    ranks_per_process: int = 0


class Phase(Enum):
    """The phase of a launch."""

    TRAINING = auto()
    DUMPING = auto()
    """Ranks were asked for their stacks and for the evidence that they have so far."""
    KILLED = auto()


class LaunchProgress:
    """Follows one launch. At ``deadline``, on the monotonic clock, the remaining ranks get the next signal.

    A rank has succeeded when its evidence is complete in time. If it then hangs in its teardown, it is killed.
    """

    def __init__(self, launch: RunningLaunch) -> None:
        self.deadline = launch.deadline
        self._launch = launch
        self._phase = Phase.TRAINING
        self._limit_reached = False
        self._waiting = set(launch.ranks)
        self._evidence: set[int] = set()
        self._dumped: set[int] = set()
        self._late: dict[int, Mapping[str, Any]] = {}
        self._unwritten: dict[int, str] = {}
        self._children = Children(launch.ranks_per_process)
        self._ends: dict[int, LaunchedRankEnd] = {}

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    @property
    def ends(self) -> list[LaunchedRankEnd]:
        return [self._ends[rank] for rank in self._launch.ranks]

    def escalate(self) -> int:
        """Return the signal for the remaining ranks at the deadline, and set the next deadline."""
        if self._phase is Phase.TRAINING:
            self._limit_reached = self.deadline == self._launch.deadline
            self._phase = Phase.DUMPING
            self.deadline = time.monotonic() + (EXIT_GRACE_S if self._limit_reached else STACK_DUMP_TIME_S)
            return signal.SIGUSR1
        self._phase = Phase.KILLED
        self.deadline = time.monotonic() + KILL_RETRY_S
        return signal.SIGKILL

    def update(self, event: Mapping[str, Any]) -> None:
        kind, rank = event["event"], event["rank"]
        self._children.update(event, late=self._phase is not Phase.TRAINING)
        if kind == "late":
            self._late[rank] = event
        elif kind == "unwritten":
            self._unwritten[rank] = event["why"]
        if self._phase is Phase.TRAINING:
            self._update_in_time(event)
        elif kind == "so_far":
            self._dumped.add(rank)
            if self._dumped >= self._waiting:
                self._end_within(STACK_DUMP_TIME_S)
        if kind == "exit":
            self._waiting.discard(rank)
            self._ends[rank] = self._end_of(rank, event)

    def _update_in_time(self, event: Mapping[str, Any]) -> None:
        rank, waiting = event["rank"], self._waiting
        if event["event"] == "evidence" or event.get("evidence"):
            self._evidence.add(rank)
        failed = False
        if event["event"] == "exit":
            waiting = waiting - {rank}
            failed = bool(event["code"]) or rank not in self._evidence
        if failed or self._evidence >= waiting:
            self._end_within(EXIT_GRACE_S)
        elif self._children.has_finished(waiting):
            self._end_within(CHILD_EXIT_TIMEOUT_S)

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _end_of(self, rank: int, event: Mapping[str, Any]) -> LaunchedRankEnd:
        late = self._late.get(rank)
        return LaunchedRankEnd(
            rank,
            evidence=rank in self._evidence,
            code=event["code"] if self._phase is Phase.TRAINING else None,
            seconds=event["at"] - self._launch.started,
            steps=(late or event)["steps"],
            limit_reached=self._limit_reached,
            stopped=late is not None and late["stopped"],
            out_of_memory=event["out_of_memory"],
            unwritten=self._unwritten.get(rank),
            silent=event.get("silent"),
            raised=self._children.call_raised(rank),
            children=self._children.of(rank),
        )
