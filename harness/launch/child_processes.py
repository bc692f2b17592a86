"""What is heard, while a launch runs, of processes that a subject has started by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

PATIENCE = 15.0
"""Seconds that a trainer gets to notice that one of its ranks is gone, and to end when all have left their evidence."""


@dataclass(frozen=True)
class ChildEnd:
    """How a process below a node's first one ended.

    ``rank`` is what it was, or most probably was; None: nobody knows. ``evidence`` is the rank of the evidence that it
    left, and ``failed`` says that there is an error in it. ``idle``: it was no rank. ``late``: it was ended with the
    launch, or with the first process of its node. ``unwritten`` says why its evidence could not be written. ``code`` is
    None where nobody saw how it ended.
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
    code: int | None = None

    @property
    def is_bad(self) -> bool:
        """Whether a rank ended that should not have."""
        return not self.late and (self.failed or (self.evidence is None and not self.idle and self.rank is not None))


class Children:
    """Collects what is heard of the children of one launch, ``per_node`` of them; a node is known by its first rank."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._evidence: dict[int, set[int]] = {}
        self._ends: dict[int, list[ChildEnd]] = {}
        self._codes: dict[int, int] = {}
        self._raised: set[int] = set()
        self._bad = False

    def hear(self, event: Mapping[str, Any], *, late: bool) -> None:
        """Take an event in, if it is about a child; ``late``: the launch is being ended."""
        if event["event"] == "left":
            self._evidence.setdefault(event["rank"], set()).add(event["trace"])
            self._bad = self._bad or event["failed"]
        elif event["event"] == "gone":
            values = {
                name: event[name] for name in ("pid", "steps", "failed", "idle", "out_of_memory", "unwritten", "at")
            }
            end = ChildEnd(rank=event["as"], evidence=event["trace"], late=late or event["killed"], **values)
            self._ends.setdefault(event["rank"], []).append(end)
            self._bad = self._bad or end.is_bad
        elif event["event"] == "raised" and not late:
            self._raised.add(event["rank"])
            self._bad = True
        elif event["event"] == "reaped":
            self._codes[event["pid"]] = event["code"]

    def leave_nothing_to_do(self, waiting: Collection[int]) -> bool:
        """Say whether a node of ``waiting`` has only to end: somebody has failed, or all ranks have left evidence."""
        if not self._per_node:
            return False
        return self._bad or all(len(self._evidence.get(first, ())) >= self._per_node for first in waiting)

    def above_raised(self, first: int) -> bool:
        """Say whether the subject's call raised on a node, while the launch was not yet being ended."""
        return first in self._raised

    def of(self, first: int) -> tuple[ChildEnd, ...]:
        """Return how the children of a node ended, in that order."""
        return tuple(replace(end, code=self._codes.get(end.pid)) for end in self._ends.get(first, ()))
