"""The outcomes of checks and cells."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Outcome(str, Enum):
    """The outcomes, mildest first. A cell has the worst outcome of its findings.

    ``DEVIATES``: not what one device computes, but exactly what the backend's contract says.
    ``UNSUPPORTED``: the subject does not declare that it supports this.
    ``ERRORED``: no verdict, because something raised, or the check could not have failed (vacuous).
    """

    SKIPPED = "skipped"
    UNSUPPORTED = "unsupported"
    PASSED = "passed"
    DEVIATES = "deviates"
    FAILED = "failed"
    ERRORED = "errored"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"

    __str__ = str.__str__  # the value, as in StrEnum of Python 3.11

    @property
    def is_bad(self) -> bool:
        return self in (Outcome.FAILED, Outcome.ERRORED, Outcome.TIMED_OUT, Outcome.CRASHED)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the most severe of ``outcomes``."""
    return max(outcomes, key=list(Outcome).index)
