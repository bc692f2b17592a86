"""What the fork server does once for all ranks: it imports what they need, and gathers its memory in large pages.

A rank that imported by itself would take about two seconds. A server that has imported torch has some 220 MB of its own
in 55 000 small pages. Each rank's fork and end walk through all of their entries: 10 ms of the 50 ms or so that a small
rank lasts, and 2 ms when most of them are large.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plumbline.core.errors import SubjectError

_LARGE = 1 << 21
_MADV_COLLAPSE = 25
"""Since Linux 6.1, whatever the system's policy but "never"; older ones decline."""


def preload(locator: str) -> list[Any]:
    """Import torch, the rank's own code, and the subjects behind ``locator``; return these.

    Raises:
        SubjectError: the locator names none, its code cannot be imported or starts CUDA when it is, or this interpreter
            has no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise SubjectError(
            f"its interpreter, {sys.executable}, cannot import torch ({error}): install torch there"
        ) from error
    import torch._dynamo  # the first DistributedDataParallel(...) imports it
    import torch.distributed
    import torch.nn.parallel

    from plumbline.subjects.load import load

    torch.set_num_threads(1)
    subjects = load(locator)
    import plumbline.worker.node_leader
    import plumbline.worker.rank  # noqa: F401
    from plumbline.trainer.gpus import driver_started

    if driver_started():
        raise SubjectError(
            f"to import {locator} starts CUDA, and ranks are forked after that, which CUDA does not survive: move what "
            "uses a device (.cuda(), torch.cuda.get_device_name(), …) into the function that trains"
        )
    # What is imported stays. A rank that collects garbage need not walk through it, nor copy its pages.
    gc.collect()
    gc.freeze()
    return subjects


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
