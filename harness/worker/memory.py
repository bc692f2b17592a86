"""How much memory a rank has used at most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

_STATUS, _ROLLUP = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")


def memory_of(devices: Sequence[torch.device]) -> dict[str, int]:
    """Return bytes and counts by metric: the CUDA allocator's over the rank's devices, or the process's own."""
    return _cuda_memory(devices) if devices[0].type == "cuda" else _private_memory()


def _cuda_memory(devices: Sequence[torch.device]) -> dict[str, int]:
    """Return the peaks of the device that has least room left, and the counts of all of them."""
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
