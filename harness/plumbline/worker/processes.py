"""What the operating system knows of a rank's processes: signals, ends for want of memory, and descendants to end.

On systems other than Linux the kernel says less, and descendants cannot be found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

KILL_TIMEOUT_S = 5.0
"""Time in which killed processes must be gone. Those that the kernel holds longer are left to it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_session(pid: int, number: int) -> None:
    """Signal a rank and all of its session; before it has one, itself alone."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger; False where that is unknown."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def has_exited(pid: int) -> bool:
    """Return whether a process has exited, also if nobody has waited for it yet; False where that is unknown."""
    fields = _stat(pid)
    return sys.platform == "linux" and (not fields or fields[0] in ("Z", "X"))


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed for want of memory, on this machine or in a control group."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies; 0: no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(70)


def adopt() -> None:
    """Become the parent of every descendant that loses its own, where the system has that (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> frozenset[int]:
    """Return the process ids of this process's children, of their children, and so on."""
    found: set[int] = set()
    above = [os.getpid()]
    while above:
        for child in _children(above.pop()) - found:
            found.add(child)
            above.append(child)
    return frozenset(found)


def end_all(spared: frozenset[int] = frozenset()) -> int:
    """End every descendant of this process except ``spared``, and return how many there were."""
    # Those that lose their parent become this process's children.
    ended = end_each(lambda: descendants() - spared, after_each=_reap)
    _reap()
    return ended


def end_each(find: Callable[[], Set[int]], after_each: Callable[[], None] = lambda: None) -> int:
    """End the processes that ``find`` returns until it finds none; return how many there were.

    It is called repeatedly, for at most ``KILL_TIMEOUT_S``: processes may have forked in the meantime.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (living := find()) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process has no more children
            for pid in living:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        ended |= living
        after_each()
    return len(ended)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    except OSError:  # it is gone, or this is not Linux
        pass
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process's state on, none where there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
