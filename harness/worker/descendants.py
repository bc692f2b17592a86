"""Processes that ranks start and leave behind, wherever they went: the fork server inherits them, and ends them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36

PATIENCE = 5.0
"""Seconds in which what is killed must be gone. What the kernel holds longer is left to it."""


def adopt() -> None:
    """Become the parent of every descendant that loses its own. Elsewhere than on Linux there is no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def present() -> frozenset[int]:
    """Return every descendant of this process."""
    return frozenset(_descendants(os.getpid()))


def end_all(spared: frozenset[int] = frozenset()) -> int:
    """End every descendant of this process but those ``spared``, and return how many there were.

    Again and again: those that lose their parent become this process' children, and some have children meanwhile.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    while (living := _descendants(os.getpid()) - spared) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # who stands still has no more children
            for pid in living:
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        ended |= living
        _reap()
    _reap()
    return len(ended)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    above = [pid]
    while above:
        for child in _children(above.pop()) - found:
            found.add(child)
            above.append(child)
    return found


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    except OSError:  # it is gone, or this is not Linux
        pass
    return found
