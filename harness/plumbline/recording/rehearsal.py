"""Tells observers of samples and losses that a library only rehearses, as a pipeline does to learn shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_DEPTH = [0]


@contextmanager
def rehearsal() -> Iterator[None]:
    """Return a context in which modules and losses are computed, but train nothing.

    Unlike while ``paused``, all else is recorded: random numbers that are drawn here, for example, are used up.
    """
    _DEPTH[0] += 1
    try:
        yield
    finally:
        _DEPTH[0] -= 1


def is_rehearsal() -> bool:
    """Return whether what runs now is a ``rehearsal``."""
    return _DEPTH[0] > 0
