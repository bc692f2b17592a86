"""The processes that a subject starts itself, from the events about them during a launch."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

CHILD_EXIT_TIMEOUT_S = 15.0
"""Time for a trainer to notice that one of its ranks is gone, or to end after all have written their evidence."""


_SAME_NAMES = ("pid", "steps", "failed", "idle", "out_of_memory", "unwritten", "orphaned", "at")
"""The fields that an event about a child's end and a ``ChildEnd`` have in common."""


@dataclass(frozen=True)
class ChildEnd:
    """How a process ended that the first process of a node had started, directly or not.

    ``rank`` is the rank that it (most probably) was, None if unknown. ``evidence`` is the rank whose evidence it wrote;
    ``failed`` says that this contains an error. ``idle``: it was not a rank. ``late``: it was ended together with the
    launch, or with the first process of its node. ``unwritten`` says why its evidence could not be written. ``code`` is
    None if the exit code is unknown. ``orphaned``: the first process of its node had exited before it.
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
        """Whether it ended without evidence, and not by SIGTERM or SIGABRT, with which ranks end after another one."""
        return self.evidence is None and self.code not in (None, -signal.SIGTERM, -signal.SIGABRT)


def first_to_fail(children: Iterable[ChildEnd], cut_off: Collection[int] = ()) -> ChildEnd | None:
    """Return the child that failed first. The others end because of it.

    ``cut_off`` has the ranks that raised because they lost the connection to another one. The time alone does not
    decide, because a busy machine may report the ends in another order. A rank that died breaks the connections of
    others, which then raise; and when one has raised, others are terminated.
    """
    bad = (one for one in children if one.is_bad)
    return min(
        bad, key=lambda one: (not one.died, not (one.failed and one.evidence not in cut_off), one.at), default=None
    )


class Children:
    """Collects the events about a launch's children, ``per_node`` on each node. The first rank identifies a node."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._evidence: dict[int, set[int]] = {}
        self._ends: dict[int, list[ChildEnd]] = {}
        self._codes: dict[int, int] = {}
        self._raised: set[int] = set()
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
            self._raised.add(event["rank"])
            self._bad = True
        elif event["event"] == "reaped":
            self._codes[event["pid"]] = event["code"]

    def has_finished(self, waiting: Collection[int]) -> bool:
        """Return whether the nodes in ``waiting`` only have to end: a rank has failed, or all have written evidence."""
        if not self._per_node:
            return False
        return self._bad or all(len(self._evidence.get(first, ())) >= self._per_node for first in waiting)

    def call_raised(self, first: int) -> bool:
        return first in self._raised

    def of(self, first: int) -> tuple[ChildEnd, ...]:
        return tuple(map(self._with_code, self._ends.get(first, ())))

    def _with_code(self, end: ChildEnd) -> ChildEnd:
        code = self._codes.get(end.pid)
        # An orphan without an exit code ended because its parent was gone.
        return replace(end, code=code, late=end.late or (end.orphaned and code is None and end.evidence is None))
