"""How one rank ended: what it returned or raised, what it printed, and where it was if it did neither."""

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
    """Its process ended by itself, by a signal or by ``os._exit``."""
    HUNG = "hung"
    """It was ended when the time limit was over."""
    ENDED = "ended"
    """It was ended because another rank had failed."""


class UnpicklableError(Exception):
    """Stands for an exception or a value of a rank that cannot be pickled."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``value`` is what the function returned, ``error`` what it raised; ``description`` is what the caller's ``describe``
    made of that on the rank. ``code`` is the exit code of a rank that died, negative for a signal. ``calls`` are those
    in which a rank was when it hung, was ended, or died by a signal, the innermost first. ``seconds`` after the start
    it returned, raised, died, or was ended.
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
        """Whether the failure is the rank's own."""
        return self.how in (How.RAISED, How.DIED, How.HUNG)

    @property
    def waits_in(self) -> str | None:
        """The collective in which it waited, None where it was in none."""
        return collective_of(self.calls)
