"""Tells hooks whether the script is running, or for example a replay, which is not part of the training."""

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
    """Return whether recording is ``paused``, or a CUDA graph is being captured, which reading tensors would break."""
    cuda: Any = torch.cuda
    return _DEPTH[0] > 0 or (cuda.is_initialized() and cuda.is_current_stream_capturing())
