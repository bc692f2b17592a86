"""Ends processes that a fork server left when it was killed itself: they are known by a variable they inherited."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from harness.worker.descendants import PATIENCE

MARK = "PLUMBLINE_POOL"
"""The variable. Everything that starts in a pool has the pool's own value, unless it cleared its environment."""


def end_marked(value: str) -> None:
    """End every process of this user that carries the mark. Elsewhere than on Linux they cannot be found.

    Again and again, until nobody is found: some have children meanwhile.
    """
    mark = f"{MARK}={value}".encode()
    deadline = time.monotonic() + PATIENCE
    while (living := _marked(mark)) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # who stands still has no more children
            for pid in living:
                try:
                    os.kill(pid, number)
                except OSError:  # it is gone, or not ours
                    continue


def _marked(mark: bytes) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue
    return found
