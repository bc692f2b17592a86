"""Temporary folders that their process removes or, if it was killed, the next process that needs one.

Each process that uses a folder has a shared lock on a file in it, which the kernel releases when the process dies. A
folder whose lock is free is abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

RUN, NODE = "plumbline-run-", "pl-"
"""Prefixes of folders: for the evidence of a run, and for the temporary files of a subject that starts its ranks. The
second one is short, because the paths of sockets must be."""

_LOCK = ".plumbline-in-use"


class Scratch:
    """A folder that this process uses until ``leave``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def new(cls, prefix: str, place: str | os.PathLike[str] | None = None) -> Scratch:
        """Create one in ``place``, by default the temporary directory, and remove abandoned ones there."""
        place = os.fspath(place or tempfile.gettempdir())
        for name in os.listdir(place):
            if name.startswith((RUN, NODE)):
                _remove_if_abandoned(os.path.join(place, name))
        while True:
            # Another process may remove it as abandoned before it is locked.
            with suppress(FileNotFoundError):
                made = cls(tempfile.mkdtemp(prefix=prefix, dir=place))
                if os.path.samestat(os.fstat(made._lock), os.stat(os.path.join(made.path, _LOCK))):
                    return made
                made.leave(remove=False)

    def leave(self, *, remove: bool) -> None:
        """Stop using it, and ``remove`` it with its contents unless other processes use it."""
        if remove:
            _remove(self.path)
        os.close(self._lock)


def _remove_if_abandoned(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        with suppress(OSError):
            if os.path.basename(path).startswith(RUN):
                os.rmdir(path)  # its process was killed before it locked the folder
        return
    with suppress(OSError):  # it is in use
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    os.close(lock)


def _remove(path: str) -> None:
    """Remove a folder, its lock file last. The folder remains while another process writes there."""
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with suppress(OSError):
                    os.unlink(entry.path)
        if os.listdir(path) == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
