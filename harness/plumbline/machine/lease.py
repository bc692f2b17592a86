"""Locks on this machine and its devices: examined cells share the machine, a measured cell has it exclusively.

The locks are ``flock`` locks on files in the temporary directory, so they hold between processes (xdist workers, two
runs at once) and the kernel drops them when their holder dies.

A process takes the door lock before the machine lock. A process that wants the machine exclusively keeps the door lock
while it waits: otherwise new shared leases could starve it.

By default, a shared lease locks its devices exclusively, because two trainings can need more memory than one device
has. Every process takes devices in the order of their names, so no deadlock can arise.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_DOOR, _MACHINE = "plumbline.door.lock", "plumbline.machine.lock"


class Lease:
    """A lock on the machine and on some of its devices; a context manager."""

    def __init__(self, machine: int) -> None:
        self._machine: int | None = machine
        self._devices: list[int] = []

    def give_back_devices(self) -> None:
        while self._devices:
            os.close(self._devices.pop())

    def give_back(self) -> None:
        self.give_back_devices()
        if self._machine is not None:
            os.close(self._machine)
            self._machine = None

    def take(self, device: str, operation: int) -> None:
        self._devices.append(_lock(_file_of(device), operation))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


def shared_lease(
    devices: Sequence[str] = (),
    *,
    share_devices: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> Lease:
    """Share the machine and lock ``devices`` once no other process has or wants the machine exclusively.

    With ``share_devices``, other leases with that option can have the same devices. ``notify`` receives a message
    before this function waits for a device.
    """
    return _share(devices, fcntl.LOCK_SH if share_devices else fcntl.LOCK_EX, 0, notify)


def try_shared_lease(devices: Sequence[str] = (), *, share_devices: bool = False) -> Lease | None:
    try:
        return _share(devices, fcntl.LOCK_SH if share_devices else fcntl.LOCK_EX, fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _share(
    devices: Sequence[str], operation: int, mode: int, notify: Callable[[str], None] = lambda message: None
) -> Lease:
    with Lease(_lock(_DOOR, fcntl.LOCK_EX | mode)):
        lease = Lease(_lock(_MACHINE, fcntl.LOCK_SH | mode))
    try:
        for device in sorted(devices):
            try:
                lease.take(device, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if mode == fcntl.LOCK_NB:
                    raise
                notify(f"waiting for {device}, held by {_holders(device) or 'another process'}")
                lease.take(device, operation)
    except BaseException:
        lease.give_back()
        raise
    return lease


def exclusive_lease() -> Lease:
    """Lock the machine once no other process uses it. A process that holds a shared lease would wait forever."""
    with Lease(_lock(_DOOR, fcntl.LOCK_EX)):
        return Lease(_lock(_MACHINE, fcntl.LOCK_EX))


def _file_of(device: str) -> str:
    return f"plumbline.{device.replace('/', '-').replace(' ', '-')}.lock"


def _lock(name: str, operation: int) -> int:
    path = os.path.join(tempfile.gettempdir(), name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:
        # Another user's file in a sticky directory: O_CREAT is refused there (fs.protected_regular).
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _holders(device: str) -> str:
    found = []
    with suppress(OSError):
        inode = os.stat(os.path.join(tempfile.gettempdir(), _file_of(device))).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # For example "7: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF"; a waiter has "->" before the kind.
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                found.append(f"process {words[4]}")
    return ", ".join(found)
