"""How a rank ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from plumbline.launch.stacks import PendingCall, collective_of


class How(enum.Enum):
    """The ways in which a rank ends."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    """Its process ended by a signal or by ``os._exit``."""
    HUNG = "hung"
    """It was killed at the time limit."""
    ENDED = "ended"
    """It was killed because another rank had failed."""


class UnpicklableError(Exception):
    """Stands for an exception or a value of a rank that cannot be pickled."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, ``seconds`` after the start.

    ``value`` is what the function returned, ``error`` what it raised; ``description`` is the result of the caller's
    ``describe`` for that error. ``code`` is the exit code of a rank that died, negative for a signal. ``calls`` are the
    pending calls of a rank that hung, was killed, or died by a signal, the innermost first.
    """

    rank: int
    how: How
    seconds: float
    value: Any = None
    error: BaseException | None = None
    description: Any = None
    code: int | None = None
    calls: tuple[PendingCall, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def has_failed(self) -> bool:
        return self.how in (How.RAISED, How.DIED, How.HUNG)

    @property
    def waits_in(self) -> str | None:
        """The collective in which it waited, if any."""
        return collective_of(self.calls)
