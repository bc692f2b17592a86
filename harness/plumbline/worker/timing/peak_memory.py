"""How much memory a rank has used at most; and how it keeps what it has, where its steps are timed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_STATUS, _ROLLUP = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER, _MOST = 2**31 - 1, 2**25
"""For glibc's mallopt: bytes at the top of the heap that go back, and of a block that has pages of its own."""


def keep_freed_memory() -> None:
    """Let the C library, where it is glibc, keep what is freed for the next step, rather than give it back.

    By default it does so or not depending on what happens to lie at the top of the heap, which one line more in a loop
    decides: of three loops that compute the same for ``perf-resnet`` one had no page fault a step, and the others had
    250 to 500, for which their steps took 7 to 15 % longer.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _MOST)


def memory_of(devices: Sequence[torch.device]) -> dict[str, int]:
    """Return bytes and counts by metric: the CUDA allocator's over the rank's devices, or the process's own."""
    return _cuda_memory(devices) if devices[0].type == "cuda" else _private_memory()


def _cuda_memory(devices: Sequence[torch.device]) -> dict[str, int]:
    every = [torch.cuda.memory_stats(device) for device in dict.fromkeys(devices)]
    return {
        "memory_allocated_peak": max(stats.get("allocated_bytes.all.peak", 0) for stats in every),
        "memory_reserved_peak": max(stats.get("reserved_bytes.all.peak", 0) for stats in every),
        "allocator_retries": sum(stats.get("num_alloc_retries", 0) for stats in every),
        "out_of_memory": sum(stats.get("num_ooms", 0) for stats in every),
    }


def _private_memory() -> dict[str, int]:
    """Return the peak of what this process alone has, on Linux.

    A rank is forked from a process that has torch loaded: those pages are shared, and 8 ranks must not count them eight
    times. Private and written to is what a rank has for itself. The kernel keeps no peak of that, but it keeps one of
    all resident pages, which for a forked process begins at its fork; and what is resident no longer was private, since
    code and what the server allocated stays. So: private now, and what has been given back since the peak.
    """
    try:
        private = _kilobytes(_ROLLUP.read_text())["Private_Dirty"]
        status = _kilobytes(_STATUS.read_text())
    except (OSError, KeyError):
        return {}
    return {"memory_private_peak": (private + status["VmHWM"] - status["VmRSS"]) * 1024}


def _kilobytes(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}
