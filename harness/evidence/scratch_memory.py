"""Reads a large tensor a group of entries at a time, with buffers that are used again.

New memory costs more than what is done in it. Needs torch and nothing else, since it runs on ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

GROUP = 2**18
"""Entries read at once on a cpu: they fit into its cache. A multiple of every chunk's size."""

GROUP_ON_DEVICE = 2**22
"""The same on an accelerator, where many small launches would cost more than the memory does."""


class _Memory(threading.local):
    """Buffers of this thread, by use, dtype and device."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_MEMORY = _Memory()


def groups(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the entries of a tensor, in order and of any strides, in parts, each with the place of its first entry."""
    flat = tensor.detach().reshape(-1)
    size = GROUP if flat.device.type == "cpu" else GROUP_ON_DEVICE
    for start in range(0, flat.numel(), size):
        yield start, flat[start : start + size]


def scratch(use: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for ``size`` entries that holds anything, and is used again by the next one with this ``use``."""
    key = use, dtype, device
    if key not in _MEMORY.buffers or _MEMORY.buffers[key].numel() < size:
        _MEMORY.buffers[key] = torch.empty(size, dtype=dtype, device=device)
    return _MEMORY.buffers[key][:size]


def padded(use: str, size: int, unit: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scratch memory of whole ``unit``s for ``size`` entries; those after them are zero."""
    buffer = scratch(use, -(-size // unit) * unit, dtype, device)
    buffer[size:].zero_()
    return buffer
