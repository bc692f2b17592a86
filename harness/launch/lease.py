"""Who may use the machine: cells that are examined share it, a cell that is measured has it for itself.

Between processes (xdist's workers, two runs at once), by locks that the kernel holds on two files in the temporary
directory and drops when their holder dies. Everybody comes through the door, and who wants the machine for itself stays
there while it waits for the others to leave: else those who share could go on passing it for ever.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_DOOR, _MACHINE = "plumbline.door.lock", "plumbline.machine.lock"


class Lease:
    """The right to use the machine until it is given back; as a context, to the end of the block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def give_back(self) -> None:
        """Give it back; once is enough."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


def share() -> Lease:
    """Wait until nobody has the machine for itself, or wants it, and share it."""
    with _locked(_DOOR, fcntl.LOCK_EX):
        return Lease(_lock(_MACHINE, fcntl.LOCK_SH))


def share_now() -> Lease | None:
    """Share the machine if that needs no waiting, else return None."""
    try:
        with _locked(_DOOR, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return Lease(_lock(_MACHINE, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except BlockingIOError:
        return None


def have_alone() -> Lease:
    """Wait until nobody uses the machine, and have it for oneself. Nobody may wait here who shares it already."""
    with _locked(_DOOR, fcntl.LOCK_EX):
        return Lease(_lock(_MACHINE, fcntl.LOCK_EX))


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with Lease(_lock(name, how)):
        yield


def _lock(name: str, how: int) -> int:
    path = os.path.join(tempfile.gettempdir(), name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:
        # It is another user's, in a directory in which nobody may create what is there already.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
