"""Parses the events of fork servers and follows a launch: which ranks have ended, and when to signal the others.

``Pool.finish`` reads the events and sends the signals.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from plumbline.core.errors import WorkloadError

CHILD_EXIT_TIMEOUT_S = 15.0
"""Time for a trainer to notice that one of its ranks is gone, or to end after all have written their evidence."""


_SAME_NAMES = ("pid", "steps", "failed", "idle", "out_of_memory", "unwritten", "orphaned", "at")
"""The fields that an event about a child's end and a ``ChildEnd`` have in common."""


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: a process that a node's first process started, directly or indirectly.

    ``rank`` is the child's (most probable) rank, None if unknown. ``evidence`` is the rank whose evidence the child
    wrote, and ``failed`` whether this evidence contains an error. ``idle``: the child was not a rank. ``late``: it was
    ended together with the launch, or with the first process of its node. ``unwritten`` says why its evidence could not
    be written. ``code`` is the exit code, None if unknown. ``orphaned``: the first process of its node exited earlier.
    """

    pid: int
    rank: int | None
    steps: int | None
    evidence: int | None
    failed: bool
    idle: bool
    late: bool
    out_of_memory: bool
    unwritten: str | None
    at: float
    orphaned: bool
    code: int | None = None

    @property
    def is_bad(self) -> bool:
        return not self.late and (self.failed or (self.evidence is None and not self.idle and self.rank is not None))

    @property
    def died(self) -> bool:
        """Whether the child ended without evidence, and by itself.

        Ranks that end by SIGTERM or SIGABRT usually end because of another rank. An unknown exit code does not count.
        """
        return self.evidence is None and self.code not in (None, -signal.SIGTERM, -signal.SIGABRT)


def first_to_fail(children: Iterable[ChildEnd], cut_off: Collection[int] = ()) -> ChildEnd | None:
    """Return the child that failed first, which made the others end.

    ``cut_off`` has the ranks that raised because they lost the connection to another rank. Time decides last, because
    a busy machine can report the ends in a different order: a rank that dies breaks the connections of other ranks,
    which then raise, and once a rank has raised, the others are terminated.
    """
    bad = (one for one in children if one.is_bad)
    return min(
        bad, key=lambda one: (not one.died, not (one.failed and one.evidence not in cut_off), one.at), default=None
    )


class Children:
    """Collects the events about a launch's children, ``per_node`` on each node. A node is named by its first rank."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._evidence: dict[int, set[int]] = {}
        self._ends: dict[int, list[ChildEnd]] = {}
        self._codes: dict[int, int] = {}
        self.raised: set[int] = set()
        self._bad = False

    def update(self, event: Mapping[str, Any], *, late: bool) -> None:
        if event["event"] == "left":
            self._evidence.setdefault(event["rank"], set()).add(event["trace"])
            self._bad = self._bad or event["failed"]
        elif event["event"] == "gone":
            values = {name: event[name] for name in _SAME_NAMES}
            end = ChildEnd(rank=event["as"], evidence=event["trace"], late=late or event["killed"], **values)
            self._ends.setdefault(event["rank"], []).append(end)
            self._bad = self._bad or end.is_bad
        elif event["event"] == "raised" and not late:
            self.raised.add(event["rank"])
            self._bad = True
        elif event["event"] == "reaped":
            self._codes[event["pid"]] = event["code"]

    def has_finished(self, waiting: Collection[int]) -> bool:
        """Return whether the nodes in ``waiting`` should end now: a rank has failed, or all have written evidence."""
        if not self._per_node:
            return False
        return self._bad or all(len(self._evidence.get(first, ())) >= self._per_node for first in waiting)

    def of(self, first: int) -> tuple[ChildEnd, ...]:
        ends = (replace(end, code=self._codes.get(end.pid)) for end in self._ends.get(first, ()))
        # An orphan without an exit code ended because its parent was gone.
        return tuple(
            replace(end, late=end.late or (end.orphaned and end.code is None and end.evidence is None)) for end in ends
        )


EXIT_GRACE_S = 3.0
"""Time for ranks to end after another rank is gone or after they have written their evidence and, at the time limit, to
write the evidence that they have so far."""

STACK_DUMP_TIME_S = 0.5
"""Time for ranks to write their stacks before they are killed."""

KILL_RETRY_S = 300.0
"""Time after which ranks are killed again if their end has not been reported."""


@dataclass(frozen=True)
class LaunchedRankEnd:
    """How one rank ended. ``code`` is negative for a signal, and None if the rank was late and had to be killed.

    ``unwritten`` says why its evidence could not be written, ``silent`` why its node stopped answering. ``steps`` is
    the number of completed steps, if known. ``limit_reached``: the rank was killed at the time limit, rather than
    because other ranks were gone. ``stopped``: a signal had stopped (paused) it. ``children`` are the processes that
    the subject started, in the order in which they ended; ``raised`` says that the subject's call raised.
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

    If the subject starts its ranks itself, ``ranks_per_process`` is how many each of ``ranks`` starts; otherwise 0.
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
            raised=rank in self._children.raised,
            children=self._children.of(rank),
        )


_MAYBE_INT, _MAYBE_STR = (int, type(None)), (str, type(None))
_PLACE: dict[str, Any] = {"launch": int, "rank": int}
_CHILD: dict[str, Any] = {
    **_PLACE,
    "pid": int,
    "as": _MAYBE_INT,
    "trace": _MAYBE_INT,
    "steps": _MAYBE_INT,
    "failed": bool,
    "idle": bool,
    "killed": bool,
    "out_of_memory": bool,
    "unwritten": _MAYBE_STR,
    "orphaned": bool,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "ready": {"subjects": list},
    "refused": {"message": str},
    "so_far": _PLACE,
    "evidence": _PLACE,
    "unwritten": {**_PLACE, "why": str},
    "late": {**_PLACE, "steps": int, "stopped": bool},
    "exit": {**_PLACE, "code": int, "steps": int, "evidence": bool, "out_of_memory": bool},
    "left": _CHILD,
    "gone": _CHILD,
    "reaped": {**_PLACE, "pid": int, "code": int},
    "raised": _PLACE,
    "listens": {"port": int},
    "reached": {"failed": dict},
    "port": {"port": int},
    "workloads": {"contents": dict, "message": str},
}
"""The fields of each event, without ``at``: its time in seconds, on the monotonic clock."""


class NoEventError(ValueError):
    """A line is not a valid event of a fork server."""


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event in a line; raise ``NoEventError`` if it is not valid."""
    try:
        event: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoEventError(f"{line[:80]!r} is not JSON: {error}") from None
    fields = _FIELDS.get(str(event.get("event"))) if isinstance(event, dict) else None
    if fields is None:
        raise NoEventError(f"{line[:80]!r} is not an event")
    for name, kind in {**fields, "at": float}.items():
        if name not in event or not isinstance(event[name], kind):
            raise NoEventError(f"{event['event']!r} has no valid {name!r}")
    if not math.isfinite(event["at"]):
        raise NoEventError(f"{event['event']!r} has no finite 'at'")
    return event


def contents_of(event: dict[str, Any], place: str) -> dict[str, str]:
    """Return the fingerprints of the workloads that were imported at ``place``, by name."""
    if event["message"]:
        raise WorkloadError(f"in {place}: {event['message']}")
    return dict(event["contents"])
