"""Processes of ranks: their signals and states, out-of-memory kills, and descendants to end.

It uses the standard library alone, since it runs in the environments of subjects. Descendants are found on Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

KILL_TIMEOUT_S = 5.0
"""Time for killed processes to disappear. Processes that the kernel holds longer are left behind."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_session(pid: int, number: int) -> None:
    """Signal a rank and its session, or the rank alone if it has no session yet."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False if unknown."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def has_exited(pid: int) -> bool:
    """Return whether a process has exited, even if it has not been waited for yet; False if unknown."""
    fields = _stat(pid)
    return sys.platform == "linux" and (not fields or fields[0] in ("Z", "X"))


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed because memory ran out, on this machine or in a control group."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, or none if ``number`` is 0."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(70)


def wakeup_pipe() -> int:
    """Return a descriptor from which the numbers of SIGCHLD and SIGTERM can be read when they arrive; ignore SIGINT.

    Ctrl-C also reaches the process that started this one, which then ends this one in order.
    """
    wake, wake_write = os.pipe()
    for descriptor in (wake, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return wake


def restore_signals() -> None:
    """Undo, in a forked process, what :func:`wakeup_pipe` did."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def dump_stacks_on_request(descriptor: int) -> None:
    """Write the stacks of all threads to a descriptor at SIGUSR1, and when this process dies by a signal."""
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)


def adopt() -> None:
    """On Linux, become the parent of descendants whose parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> frozenset[int]:
    found: set[int] = set()
    above = [os.getpid()]
    while above:
        for child in _children(above.pop()) - found:
            found.add(child)
            above.append(child)
    return frozenset(found)


def end_all(spared: frozenset[int] = frozenset()) -> int:
    """End all descendants of this process except ``spared``; return how many there were."""
    # Descendants whose parent ends become children of this process.
    ended = end_each(lambda: descendants() - spared, after_each=_reap)
    _reap()
    return ended


def end_each(find: Callable[[], Set[int]], after_each: Callable[[], None] = lambda: None) -> int:
    """End the processes that ``find`` returns, until it finds none or ``KILL_TIMEOUT_S`` has passed; count them.

    ``find`` is called repeatedly, because processes may have forked in the meantime.
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


TAG = "PLUMBLINE_POOL"
"""The variable that identifies orphaned processes.

Every process of a pool has the pool's value, except processes that clear their environment.
"""


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
