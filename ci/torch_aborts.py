"""Runs commands again if torch aborts or hangs after all their work is done.

torch 2.13 does so if a model outlives its process group: four in ten runs of FSDP2 trainings beside another one ended
so. All other failures are failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

MOST_RUNS = 10


class Ended(Protocol):
    """The exit status of a command (None after a timeout), and its output."""

    @property
    def code(self) -> int | None: ...

    @property
    def output(self) -> str: ...


E = TypeVar("E", bound=Ended)


def despite_aborts(run: Callable[[], E]) -> E:
    """Run a command, again if torch aborted it; return the last result."""
    for _ in range(MOST_RUNS - 1):
        ended = run()
        if not was_aborted(ended.code, ended.output):
            return ended
    return run()


def was_aborted(code: int | None, output: str) -> bool:
    """Return whether a command hung, or one of its processes aborted: launchers report the signal's name."""
    return code is None or code < 0 or (code > 0 and "SIGABRT" in output)
