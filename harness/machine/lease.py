"""Who may use the machine: cells that are examined share it, a cell that is measured has it for itself.

Between processes (xdist's workers, two runs at once), by locks that the kernel holds on files in the temporary
directory and drops when their holder dies. Everybody comes through the door, and who wants the machine for itself stays
there while it waits for the others to leave: else those who share could go on passing it for ever.

Who shares the machine has its CUDA devices for itself: two trainings on one device may want more memory than it has,
and would be found wrong for it. Devices are taken in the order of their names, by everybody: nobody waits for one that
is held by somebody who waits for him.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

_DOOR, _MACHINE = "plumbline.door.lock", "plumbline.machine.lock"


class Lease:
    """The right to use the machine, and some of its devices, until it is given back; as a context, to its end."""

    def __init__(self, machine: int) -> None:
        self._machine: int | None = machine
        self._devices: list[int] = []

    def give_back_devices(self) -> None:
        """Give the devices back, and keep the machine: there is still something to be computed on its CPUs."""
        while self._devices:
            os.close(self._devices.pop())

    def give_back(self) -> None:
        """Give all of it back; once is enough."""
        self.give_back_devices()
        if self._machine is not None:
            os.close(self._machine)
            self._machine = None

    def take(self, device: str, how: int) -> None:
        """Take a device as well; ``how`` is as for flock."""
        self._devices.append(_lock(_file_of(device), how))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


def share(
    devices: Sequence[str] = (), *, together: bool = False, say: Callable[[str], None] = lambda text: None
) -> Lease:
    """Wait until nobody has the machine for itself, or wants it, and share it; have ``devices`` of it for oneself.

    With ``together`` the devices are shared with others who take them so. ``say`` is told for what is waited.
    """
    with _locked(_DOOR, fcntl.LOCK_EX):
        lease = Lease(_lock(_MACHINE, fcntl.LOCK_SH))
    try:
        for device in sorted(devices):
            how = fcntl.LOCK_SH if together else fcntl.LOCK_EX
            try:
                lease.take(device, how | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {device}, held by {_holders(device) or 'another process'}")
                lease.take(device, how)
    except BaseException:
        lease.give_back()
        raise
    return lease


def share_now(devices: Sequence[str] = (), *, together: bool = False) -> Lease | None:
    """Share the machine, and have ``devices`` of it, if that needs no waiting, else return None."""
    lease = None
    try:
        with _locked(_DOOR, fcntl.LOCK_EX | fcntl.LOCK_NB):
            lease = Lease(_lock(_MACHINE, fcntl.LOCK_SH | fcntl.LOCK_NB))
        for device in sorted(devices):
            lease.take(device, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        if lease is not None:
            lease.give_back()
        return None
    return lease


def have_alone() -> Lease:
    """Wait until nobody uses the machine, and have it for oneself. Nobody may wait here who shares it already."""
    with _locked(_DOOR, fcntl.LOCK_EX):
        return Lease(_lock(_MACHINE, fcntl.LOCK_EX))


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with Lease(_lock(name, how)):
        yield


def _file_of(device: str) -> str:
    return f"plumbline.{device.replace('/', '-').replace(' ', '-')}.lock"


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


def _holders(device: str) -> str:
    """Return who has a device, "" where the kernel does not say."""
    found = []
    with suppress(OSError):
        inode = os.stat(os.path.join(tempfile.gettempdir(), _file_of(device))).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # As in: 7: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF; who waits has an arrow before the kind.
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                found.append(f"process {words[4]}")
    return ", ".join(found)
