"""Temporary folders that are removed by the process that uses them or, if it was killed, by the next that needs one.

Each process that uses a folder holds a shared lock on a file in it, which the kernel releases when the process dies. A
folder whose lock is free is abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

RUN, NODE = "plumbline-run-", "pl-"
"""How the names of folders begin: of a run's evidence; of what a subject that starts its ranks writes on a node. That
one is short, because names of sockets must be."""

_LOCK = ".plumbline-in-use"


class Scratch:
    """A folder in use by this process, until it is left."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def new(cls, prefix: str, place: str | os.PathLike[str] | None = None) -> Scratch:
        """Make one, in the temporary directory or in ``place``, after removing abandoned ones there."""
        place = os.fspath(place or tempfile.gettempdir())
        for name in os.listdir(place):
            if name.startswith((RUN, NODE)):
                _remove_if_abandoned(os.path.join(place, name))
        while True:
            # Before it is locked another process may take it for an abandoned one.
            with suppress(FileNotFoundError):
                made = cls(tempfile.mkdtemp(prefix=prefix, dir=place))
                if made._is_there():
                    return made
                made.leave(remove=False)

    def leave(self, *, remove: bool) -> None:
        """Stop using it; ``remove`` it with its contents, or leave that to the other processes that use it."""
        if remove:
            _remove(self.path)
        os.close(self._lock)

    def _is_there(self) -> bool:
        return os.path.samestat(os.fstat(self._lock), os.stat(os.path.join(self.path, _LOCK)))


def _remove_if_abandoned(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        with suppress(OSError):
            if os.path.basename(path).startswith(RUN):
                os.rmdir(path)  # its maker was killed before it was locked
        return
    with suppress(OSError):  # it is in use
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    os.close(lock)


def _remove(path: str) -> None:
    """Remove a folder, the lock file last: while another process still writes there the folder remains."""
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with suppress(OSError):
                    os.unlink(entry.path)
        if os.listdir(path) == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
