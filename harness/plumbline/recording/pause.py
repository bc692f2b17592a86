"""Hooks ask here whether they run on behalf of the script: what a replay does is not part of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DEPTH = [0]


@contextmanager
def paused() -> Iterator[None]:
    """Return a context in which nothing is recorded, on any thread."""
    _DEPTH[0] += 1
    try:
        yield
    finally:
        _DEPTH[0] -= 1


def is_paused() -> bool:
    """Return whether this runs inside of ``paused``, or while a CUDA graph is captured, which reading breaks."""
    cuda: Any = torch.cuda
    return _DEPTH[0] > 0 or (cuda.is_initialized() and cuda.is_current_stream_capturing())
