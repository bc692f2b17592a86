"""Waits for a command, and sees in which order the Python processes below it end."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOK_EVERY_S = 0.5
"""How often processes that have begun are looked for."""


class ProcessWatch:
    """Follows the processes that have notes in ``folder``. ``ended`` has their ids in the order in which they ended.

    Where the system has no file descriptors for processes (those of Linux 5.3), no order is known.
    """

    def __init__(self, folder: Path) -> None:
        self.ended: list[int] = []
        self._folder = folder
        self._known: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def wait(self, process: subprocess.Popen[bytes], seconds: float | None) -> None:
        """Wait for a process that this one has started.

        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._follow(process.pid) and process.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(process.args, seconds or 0.0)
            self._look(LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Take in what has ended last, and let go of all processes."""
        self._look(0.0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _look(self, seconds: float) -> None:
        for pid in self._begun():
            self._follow(pid)
        for key, _ in self._selector.select(seconds):
            self._selector.unregister(key.fd)
            os.close(key.fd)
            self.ended.append(key.data)

    def _begun(self) -> Iterator[int]:
        with suppress(OSError):
            for file in os.scandir(self._folder):
                kind, _, number = file.name.partition("-")
                if kind == "process" and int(number) not in self._known:
                    yield int(number)

    def _follow(self, pid: int) -> bool:
        """Follow a process; return whether that is possible."""
        if pid not in self._known and hasattr(os, "pidfd_open"):
            self._known.add(pid)
            try:
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            except ProcessLookupError:
                self.ended.append(pid)
            except OSError:
                return False
        return pid in self._known
