"""Ends processes that lost whoever should end them: an environment variable that they inherited marks them."""

from __future__ import annotations

from pathlib import Path

from plumbline.worker.processes import end_each

TAG = "PLUMBLINE_POOL"
"""The variable. A process started in a pool has the pool's own value, unless it cleared its environment."""


def end_tagged(value: str, variable: str = TAG) -> None:
    """End every process of this user that carries the tag. They can be found on Linux only."""
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
