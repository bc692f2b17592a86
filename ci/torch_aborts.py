"""Commands that torch may end by a signal, or hang, when all their work is done: they are run again.

torch 2.13 does so where a model outlives its process group: of FSDP2 trainings beside another one, four runs in ten
ended so. Whatever else fails is a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

MOST_RUNS = 10


class Ended(Protocol):
    """What is known of a command that was run: its exit status, None if the time ran out, and what it printed."""

    @property
    def code(self) -> int | None: ...

    @property
    def output(self) -> str: ...


E = TypeVar("E", bound=Ended)


def despite_aborts(run: Callable[[], E]) -> E:
    """Run a command, again where torch ended it, and return how it ended at last."""
    for _ in range(MOST_RUNS - 1):
        ended = run()
        if not was_aborted(ended.code, ended.output):
            return ended
    return run()


def was_aborted(code: int | None, output: str) -> bool:
    """Return whether a command hung, or a process of it aborted, which launchers report with the signal's name."""
    return code is None or code < 0 or (code > 0 and "SIGABRT" in output)
