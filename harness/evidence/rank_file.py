"""One rank's evidence on disk: written so far while it trains, in a file beside, and whole when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from harness.evidence import write as evidence
from harness.evidence.trace import RankTrace


class RankFile:
    """The file at ``path``. ``so_far`` returns what has been recorded at the moment it is called."""

    def __init__(self, path: str, so_far: Callable[[], RankTrace]) -> None:
        self._path = path
        self._so_far = so_far
        self._finished = False
        self._lock = Lock()

    def write_so_far(self) -> None:
        """Write what has been recorded so far; nothing once the whole was written.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if not self._finished:
                evidence.write(evidence.so_far_of(self._path), self._so_far())

    def finish(self, trace: RankTrace) -> None:
        """Write the whole evidence.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            self._finished = True
            evidence.write(self._path, trace)
            with suppress(FileNotFoundError):
                os.unlink(evidence.so_far_of(self._path))
