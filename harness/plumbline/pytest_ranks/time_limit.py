"""The time limit of a marked test: the marker's, or pytest-timeout's if that ends first.

pytest-timeout would interrupt pytest's process, which only waits, and show its useless stack. Instead, ranks get that
limit, and the failure shows their stacks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from plumbline.pytest_ranks.marker import Marker

NOTED: pytest.StashKey[tuple[Any, float]] = pytest.StashKey()
"""The settings of pytest-timeout for a test, and the end of its timer on the monotonic clock."""

_LEAST_S = 0.1


def note_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[NOTED] = settings, time.monotonic() + settings.timeout


@dataclass(frozen=True)
class TimeLimit:
    """The time limit of ranks, in seconds and in words."""

    seconds: float
    words: str

    @classmethod
    @contextmanager
    def of_ranks(cls, item: pytest.Item, marker: Marker) -> Iterator[TimeLimit]:
        """Yield the limit for the ranks of a test; pytest-timeout's timer is suspended meanwhile."""
        own = cls(marker.timeout, f"{marker.timeout:g} s")
        if NOTED not in item.stash:
            yield own
            return
        settings, deadline = item.stash[NOTED]
        left = max(deadline - time.monotonic(), _LEAST_S)
        item.ihook.pytest_timeout_cancel_timer(item=item)
        yield own if own.seconds <= left else cls(left, f"{settings.timeout:g} s, the limit of pytest-timeout")
        if (left := deadline - time.monotonic()) > 0:  # for the tear-down of fixtures
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings._replace(timeout=left))
