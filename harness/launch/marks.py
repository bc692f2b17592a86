"""Ends processes that a fork server left when it was killed itself: they are known by a variable they inherited."""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARK = "PLUMBLINE_POOL"
"""The variable. Everything that starts in a pool has the pool's own value, unless it cleared its environment."""


def end_marked(value: str) -> None:
    """End every process of this user that carries the mark. Elsewhere than on Linux they cannot be found."""
    mark = f"{MARK}={value}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
        except OSError:  # it is gone, or not ours
            continue
