"""The marker ``ranks``: the number of ranks, the time limit and the backend of a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest

NAME = "ranks"
DEFAULT_TIMEOUT_S = 60.0
DESCRIPTION = (
    "ranks(n, *, timeout=60, backend=None, init=True): run the body of the test on n ranks of torch.distributed, for "
    "at most timeout seconds; by default the backend is that of the devices, such as nccl, if there is one for each "
    "rank, and gloo otherwise; with init=False the body initialises the process group itself (Plumbline)"
)
_USAGE = "write @pytest.mark.ranks(4), @pytest.mark.ranks(4, timeout=120) or @pytest.mark.ranks(4, backend='gloo')"


@dataclass(frozen=True)
class Marker:
    """The arguments of a test's marker."""

    ranks: int
    timeout: float = DEFAULT_TIMEOUT_S
    backend: str | None = None
    init: bool = True


def marker_of(item: pytest.Item) -> Marker | str | None:
    """Return the closest marker of a test, None without one, or an error message if it is not valid."""
    mark = item.get_closest_marker(NAME)
    if mark is None:
        return None
    known = {field.name for field in fields(Marker)}
    for name in mark.kwargs:
        if name not in known:
            return f"@pytest.mark.ranks has no argument {name!r}: {_USAGE}"
    try:
        marker = Marker(*mark.args, **mark.kwargs)
    except TypeError:
        return f"@pytest.mark.ranks takes a number of ranks: {_USAGE}"
    if len(mark.args) > 1:
        return f"@pytest.mark.ranks takes timeout, backend and init by name: {_USAGE}"
    if not isinstance(marker.ranks, int) or isinstance(marker.ranks, bool) or marker.ranks < 1:
        return f"@pytest.mark.ranks({marker.ranks!r}): the number of ranks must be at least 1: {_USAGE}"
    if not isinstance(marker.timeout, (int, float)) or not marker.timeout > 0:
        return f"@pytest.mark.ranks(timeout={marker.timeout!r}): the time limit must be positive: {_USAGE}"
    if not isinstance(marker.backend, (str, type(None))):
        return f"@pytest.mark.ranks(backend={marker.backend!r}): the backend must be a name, such as 'gloo': {_USAGE}"
    if not isinstance(marker.init, bool):
        return f"@pytest.mark.ranks(init={marker.init!r}): init must be True or False: {_USAGE}"
    return marker


NOTED: pytest.StashKey[tuple[Any, float]] = pytest.StashKey()
"""The settings of pytest-timeout for a test, and the end of its timer on the monotonic clock."""

_LEAST_S = 0.1


def note_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[NOTED] = settings, time.monotonic() + settings.timeout


@dataclass(frozen=True)
class TimeLimit:
    """The time limit of ranks, in seconds and in words: the marker's, or pytest-timeout's if that ends first.

    pytest-timeout would interrupt pytest's process, which only waits, and show its useless stack.
    """

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
