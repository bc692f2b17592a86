"""The time limit of a marked test: its marker's, or that of pytest-timeout where that one ends first.

pytest-timeout would interrupt the process of pytest, which only waits: its stack says nothing about the test. So ranks
are given its limit, and are ended by it with their own stacks.
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
"""The settings of pytest-timeout for a test, and when its timer ends, by the monotonic clock."""

_LEAST_S = 0.1


def note_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[NOTED] = settings, time.monotonic() + settings.timeout


@dataclass(frozen=True)
class TimeLimit:
    """How long ranks may take, in seconds, and the limit in words."""

    seconds: float
    words: str

    @classmethod
    @contextmanager
    def of_ranks(cls, item: pytest.Item, marker: Marker) -> Iterator[TimeLimit]:
        """Yield the limit for the ranks of a test; pytest-timeout's timer stands still for as long."""
        own = cls(marker.timeout, f"{marker.timeout:g} s")
        if NOTED not in item.stash:
            yield own
            return
        settings, deadline = item.stash[NOTED]
        left = max(deadline - time.monotonic(), _LEAST_S)
        item.ihook.pytest_timeout_cancel_timer(item=item)
        yield own if own.seconds <= left else cls(left, f"{settings.timeout:g} s, the limit of pytest-timeout")
        if (left := deadline - time.monotonic()) > 0:  # for the fixtures that are torn down here
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings._replace(timeout=left))
