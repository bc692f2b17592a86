"""Tells hooks whether what runs is a part of the training. Replays and rehearsals, for example, are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

_PAUSES, _REHEARSALS = [0], [0]
"""How many of these contexts are open, on any thread."""


@contextmanager
def _open(count: list[int]) -> Iterator[None]:
    count[0] += 1
    try:
        yield
    finally:
        count[0] -= 1


def paused() -> AbstractContextManager[None]:
    """Return a context in which nothing is recorded, on any thread."""
    return _open(_PAUSES)


def is_paused() -> bool:
    """Return whether recording is ``paused``, or a CUDA graph is being captured, which reading tensors would break."""
    cuda: Any = torch.cuda
    return _PAUSES[0] > 0 or (cuda.is_initialized() and cuda.is_current_stream_capturing())


def rehearsal() -> AbstractContextManager[None]:
    """Return a context in which modules and losses are computed, but train nothing.

    Unlike while ``paused``, all else is recorded: random numbers that are drawn here, for example, are used up.
    """
    return _open(_REHEARSALS)


def is_rehearsal() -> bool:
    return _REHEARSALS[0] > 0
