"""How much of this machine's memory is free, read without a library."""

from __future__ import annotations

from pathlib import Path


def free_bytes_of_host() -> int | None:
    """Return how many bytes processes of this machine can still allocate; None if this is unknown."""
    limits = [one for one in (_available(), _left_in_group()) if one is not None]
    return min(limits) if limits else None


def _available() -> int | None:
    """Return the memory that a process can use without swapping, according to Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _left_in_group() -> int | None:
    """Return what is left below the limit of the control group (version 2), as a container sees it."""
    try:
        group = Path("/sys/fs/cgroup")
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(used["active_file"]) + int(used["inactive_file"])  # cached files, which can be dropped
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()) + cached
    except (OSError, KeyError, ValueError):  # no group, or no limit ("max")
        return None
