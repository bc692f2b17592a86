"""Where evidence lies while a run goes on: a folder that is removed with its run, or, if that was killed, by the next.

Each process that uses the folder shares a lock on a file in it, which the kernel drops when the process dies. Where
nobody shares it any more the folder is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "plumbline-run-", "in-use"


class Workspace:
    """A folder in use by this process, until it is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def new(cls, place: Path | None = None) -> Workspace:
        """Make one, in the temporary directory or in ``place``, after removing there what killed runs have left."""
        place = place or Path(tempfile.gettempdir())
        for left in place.glob(f"{_PREFIX}*"):
            _remove_if_nobodys(left)
        # Under another name until it is locked: nobody may take it for one that was left.
        young = Path(tempfile.mkdtemp(prefix=".plumbline-", dir=place))
        workspace = cls(young)
        workspace.path = young.rename(place / f"{_PREFIX}{young.name.removeprefix('.plumbline-')}")
        return workspace

    def folder(self) -> Path:
        """Return a new, empty folder in it."""
        return Path(tempfile.mkdtemp(prefix="cell-", dir=self.path))

    def leave(self, *, remove: bool) -> None:
        """Use it no longer, and remove it with all that is in it, or leave that to others who use it."""
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_nobodys(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it has just been removed, or is another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # somebody uses it
        pass
    finally:
        os.close(lock)
