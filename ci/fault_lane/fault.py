"""A fault, what became of it, and what it left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fault_lane.left import Leftovers


class ImpossibleHereError(Exception):
    """What a fault needs cannot be done on this machine, or by this user; the sentence says what."""


@dataclass(frozen=True)
class Shot:
    """One injection: whether what must be seen was seen, and what was."""

    right: bool
    seen: str


@dataclass(frozen=True)
class Fault:
    """One way in which things go wrong. ``row`` is its family's number, ``must`` says what must be seen.

    ``inject`` does it once, with the bench, in a folder of its own. ``quick``: it takes a second or two.
    ``file`` holds the subjects whose warm pool it needs.
    """

    name: str
    row: int
    must: str
    inject: Callable[[Any, Path], Shot]
    quick: bool = False
    file: str | None = None


@dataclass(frozen=True)
class Tally:
    """A fault's line in the table: what was seen of so many injections, in how many seconds.

    ``load`` is the highest load average (of one minute) that was read after one of them.
    """

    row: int
    name: str
    must: str
    times: int
    right: int
    left: Leftovers
    seconds: float
    load: float
    wrong: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all was seen, and nothing left."""
        return self.right == self.times and self.left == Leftovers()

    def __add__(self, other: Tally) -> Tally:
        """Return both together: what was once seen to be wrong stays."""
        return replace(
            other,
            times=self.times + other.times,
            right=self.right + other.right,
            left=self.left + other.left,
            seconds=self.seconds + other.seconds,
            load=max(self.load, other.load),
            wrong=self.wrong + other.wrong,
        )
