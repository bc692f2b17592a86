"""Kills orphaned processes. They are identified by an environment variable that they inherited."""

from __future__ import annotations

from pathlib import Path

from plumbline.worker.processes import end_each

TAG = "PLUMBLINE_POOL"
"""The variable. Every process of a pool has the pool's value, except processes that clear their environment."""


def end_tagged(value: str, variable: str = TAG) -> None:
    """Kill every process of this user whose variable has this value. Works on Linux only."""
    tag = f"{variable}={value}".encode()
    end_each(lambda: _tagged(tag))


def _tagged(tag: bytes) -> set[int]:
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (place / "environ").read_bytes().split(b"\0"):
                found.add(int(place.name))
        except OSError:
            continue
    return found
