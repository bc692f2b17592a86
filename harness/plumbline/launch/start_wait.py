"""Waits for a starting server as long as it makes progress, and tells the user what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

START_TIMEOUT_S = 300.0
"""Time without progress after which the wait ends."""

NOTIFY_INTERVAL_S = 30.0
"""The interval of messages to the user."""

CHECK_INTERVAL_S = 1.0
"""The interval at which CPU time is read."""

_LEAST_PROGRESS_S = 0.05

Notify = Callable[[str], None]
"""Shows a message to the user at once."""


def ignore(message: str) -> None:
    """Show nothing."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time, in seconds, of these processes and their descendants; 0 for those that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    total += sum(one.cpu_times()[:4])  # its own time, and the time of children it has waited for
    return total


class StartWait:
    """Times one start, from now on.

    The limit counts from the last progress, so a slow or busy machine gets the time it needs. Each reported event is
    progress, and so is CPU time that the server uses, as returned by ``cpu_seconds``. Once a server has used
    ``START_TIMEOUT_S`` of CPU time, further CPU time is no progress.
    """

    def __init__(self, cpu_seconds: Callable[[], float], notify: Notify = ignore) -> None:
        self._cpu_seconds = cpu_seconds
        self._notify = notify
        self._started = self._progress = time.monotonic()
        self._notified = self._checked = self._started
        self._used = cpu_seconds()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def next_check(self) -> float:
        """The time, on the monotonic clock, of the next call of ``goes_on`` if nothing happens before."""
        return time.monotonic() + CHECK_INTERVAL_S

    def report_progress(self) -> None:
        self._progress = time.monotonic()

    def goes_on(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._checked >= CHECK_INTERVAL_S:
            self._checked, used = now, self._cpu_seconds()
            if self._used + _LEAST_PROGRESS_S < used < START_TIMEOUT_S:
                self._used, self._progress = used, now
        if now - self._progress > START_TIMEOUT_S:
            return False
        if now - self._notified > NOTIFY_INTERVAL_S:
            self._notified = now
            self._notify(f"waiting for {what} ({self.seconds:.0f} s so far)")
        return True
