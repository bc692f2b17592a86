"""Refuses more ranks than this machine can hold, before any is started."""

from __future__ import annotations

import os
from pathlib import Path

from plumbline.devices.host_memory import free_bytes_of_host

LEAST_BYTES = 6 << 20
"""Memory that a rank has for itself, at least: one that is forked, joins a group over gloo and reduces a single tensor
has 6.0 to 6.3 MiB (Linux, torch 2.13, 2 to 24 ranks). It only refuses what cannot work: ranks that train need more."""

_GIB = 1 << 30


def why_too_many(ranks: int) -> str:
    """Return why this machine cannot hold so many ranks, in a sentence; "" if it may."""
    free, most = free_bytes_of_host(), _processes_left()
    if most is not None and ranks > most:
        return f"{ranks} ranks need {ranks} processes, and this machine allows at most {most}: use fewer"
    needed = ranks * LEAST_BYTES
    if free is not None and needed > free:
        return (
            f"{ranks} ranks need about {_gib(needed)} GiB of memory, and this machine has {_gib(free)} GiB free: use "
            "fewer"
        )
    return ""


def _gib(size: int) -> str:
    return f"{size / _GIB:,.0f}" if size >= 10 * _GIB else f"{size / _GIB:.1f}"


def _processes_left() -> int | None:
    """Return how many processes can be started at most; None if this is unknown. Running ones count where possible."""
    limits = [_number("/proc/sys/kernel/pid_max")]
    if (most := _number("/sys/fs/cgroup/pids.max")) is not None:
        limits.append(most - (_number("/sys/fs/cgroup/pids.current") or 0))
    if hasattr(os, "geteuid") and os.geteuid() != 0:  # the limit does not apply to root
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits.append(None if soft == resource.RLIM_INFINITY else soft)
    return min((one for one in limits if one is not None), default=None)


def _number(file: str) -> int | None:
    try:
        return int(Path(file).read_text(encoding="ascii"))
    except (OSError, ValueError):  # another system, or "max": no limit
        return None
