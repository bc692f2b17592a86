"""A fork server's memory in large pages: what a fork copies, and an end gives back, is then a page table of hundreds.

A server that has imported torch has some 220 MB of its own in 55 000 small pages. Each rank's fork and end walk through
all of their entries: 10 ms of the 50 ms or so that a small rank lasts, and 2 ms when most of them are large.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_LARGE = 1 << 21
_MADV_COLLAPSE = 25
"""Since Linux 6.1, whatever the system's policy but "never"; older ones decline."""


def gather_in_large_pages() -> None:
    """Gather this process's private memory in large pages, where the kernel does that; what is in it stays.

    A rank that writes to one gets a small page of its own, as ever.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in _private_ranges():
        # One at a time: a page that cannot be gathered, as one with a hole, would end the call.
        for page in range(-(-first // _LARGE) * _LARGE, last // _LARGE * _LARGE, _LARGE):
            madvise(page, _LARGE, _MADV_COLLAPSE)


def _private_ranges() -> Iterator[tuple[int, int]]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, allowed, _, _, inode = line.split()[:5]
        if allowed == "rw-p" and inode == "0":
            first, last = (int(end, 16) for end in addresses.split("-"))
            yield first, last
