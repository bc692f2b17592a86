"""Mounts small, full or read-only file systems for faults. Only this process and its children see them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fault_lane.fault import ImpossibleHereError

_NEWNS, _PRIVATE, _RDONLY, _DETACH = 0x20000, 0x4000 | 0x40000, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def own_shared_memory() -> bool:
    """Give this process and its children their own mounts and /dev/shm; return False if that is not allowed."""
    if _libc.unshare(_NEWNS) or _libc.mount(b"none", b"/", None, _PRIVATE, None):
        return False
    return bool(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=512m") == 0)


@contextmanager
def mounted(place: Path, options: str, read_only: bool = False) -> Iterator[None]:
    """Mount a new, empty file system at ``place``.

    Raises:
        ImpossibleHereError: mounting is not allowed here.
    """
    flags = _RDONLY if read_only else 0
    if _libc.mount(b"tmpfs", bytes(place), b"tmpfs", flags, options.encode()):
        raise ImpossibleHereError("mounting needs root")
    try:
        yield
    finally:
        _libc.umount2(bytes(place), _DETACH)
