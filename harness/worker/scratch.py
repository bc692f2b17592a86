"""Temporary folders that go with whoever uses them, or, if that was killed, with the next who needs one.

Each process that uses a folder shares a lock on a file in it, which the kernel drops when the process dies. Where
nobody shares it any more the folder is nobody's.
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
        """Make one, in the temporary directory or in ``place``, after removing there what was left by the killed."""
        place = os.fspath(place or tempfile.gettempdir())
        for name in os.listdir(place):
            if name.startswith((RUN, NODE)):
                _remove_if_nobodys(os.path.join(place, name))
        while True:
            # Before it is locked somebody may take it for one that was left.
            with suppress(FileNotFoundError):
                made = cls(tempfile.mkdtemp(prefix=prefix, dir=place))
                if made._is_there():
                    return made
                made.leave(remove=False)

    def leave(self, *, remove: bool) -> None:
        """Use it no longer, and remove it with all that is in it, or leave that to others who use it."""
        if remove:
            _remove(self.path)
        os.close(self._lock)

    def _is_there(self) -> bool:
        return os.path.samestat(os.fstat(self._lock), os.stat(os.path.join(self.path, _LOCK)))


def _remove_if_nobodys(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        with suppress(OSError):
            if os.path.basename(path).startswith(RUN):
                os.rmdir(path)  # its maker was killed before it was locked
        return
    with suppress(OSError):  # somebody uses it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    os.close(lock)


def _remove(path: str) -> None:
    """Remove a folder. What tells whose it is goes last: while somebody still writes there this ends half-way."""
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with suppress(OSError):
                    os.unlink(entry.path)
        if os.listdir(path) == [_LOCK]:
            shutil.rmtree(path, ignore_errors=True)
