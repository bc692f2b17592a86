"""What several parts of one report are made from is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from harness.results.run import Run

T = TypeVar("T")


def once_for_a_run(make: Callable[[Run], T]) -> Callable[[Run], T]:
    """Let ``make`` work once for each run: what it returns stays with the run, and is not to be changed."""
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def kept(run: Run) -> T:
        beside = vars(run)  # a run has no hash to be found by, and what lies beside its fields is not compared
        if name not in beside:
            beside[name] = make(run)
        return cast("T", beside[name])

    return kept
