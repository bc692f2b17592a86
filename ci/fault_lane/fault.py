"""The types of a fault, of its injection, and of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fault_lane.left import Leftovers


class ImpossibleHereError(Exception):
    """A fault cannot be injected on this machine or by this user; the message says what is missing."""


@dataclass(frozen=True)
class Shot:
    """The result of one injection: whether all that must be seen was seen, and what was seen."""

    right: bool
    seen: str


@dataclass(frozen=True)
class Fault:
    """A fault. ``row`` is the number of its family, and ``must`` describes what must be seen.

    ``inject`` injects it once, with the bench, in a folder of its own. ``quick``: it takes a second or two. ``file``
    has the subjects whose warm pool it needs.
    """

    name: str
    row: int
    must: str
    inject: Callable[[Any, Path], Shot]
    quick: bool = False
    file: str | None = None


@dataclass(frozen=True)
class Tally:
    """A fault's line in the table: the results of its injections, and their seconds.

    ``load`` is the highest one-minute load average that was read after an injection.
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
        """Whether all was seen, and nothing was left behind."""
        return self.right == self.times and self.left == Leftovers()

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both; a failure stays a failure."""
        return replace(
            other,
            times=self.times + other.times,
            right=self.right + other.right,
            left=self.left + other.left,
            seconds=self.seconds + other.seconds,
            load=max(self.load, other.load),
            wrong=self.wrong + other.wrong,
        )
