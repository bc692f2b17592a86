"""Finds leftovers: processes, shared memory, temporary folders, listening sockets, descriptors of this process.

Processes are recognised by an environment variable that all processes started here inherit, or by their parents.
Folders are recognised because they are in our own temporary folder.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

MARK = "PLUMBLINE_FAULTS"
"""The environment variable by which processes started by a fault are recognised."""

SETTLING = 5.0
"""Seconds that ended processes get to disappear."""

_LISTENS = "0A"

_OTHERS = ("pytest-of-", "torchinductor_")
"""Prefixes of folders that pytest and torch keep for the next time."""


@dataclass(frozen=True)
class Leftovers:
    """Counts. ``processes`` are alive but should not be; zombies of this process count too."""

    processes: int = 0
    shared_memory: int = 0
    folders: int = 0
    listening: int = 0
    descriptors: int = 0

    def __add__(self, other: Leftovers) -> Leftovers:
        return Leftovers(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        names = ("processes", "/dev/shm", "folders", "listening", "descriptors")
        return (
            ", ".join(f"{count} {name}" for name, count in zip(names, astuple(self), strict=True) if count) or "nothing"
        )


@dataclass(frozen=True)
class Present:
    """The processes and files at one moment."""

    processes: frozenset[int]
    shared_memory: frozenset[str]
    folders: frozenset[str]
    listening: frozenset[str]
    descriptors: int

    @classmethod
    def now(cls, temporary: Path) -> Present:
        """Return those of this moment."""
        processes = _ours()
        return cls(
            processes=frozenset(processes),
            shared_memory=frozenset(os.listdir("/dev/shm")),
            folders=frozenset(
                entry.name for entry in os.scandir(temporary) if entry.is_dir() and not entry.name.startswith(_OTHERS)
            ),
            listening=frozenset(_listening({os.getpid(), *processes})),
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def left(self, before: Present) -> Leftovers:
        """Return what exists now but did not before."""
        return Leftovers(
            len(self.processes - before.processes),
            len(self.shared_memory - before.shared_memory),
            len(self.folders - before.folders),
            len(self.listening - before.listening),
            max(0, self.descriptors - before.descriptors),
        )


def left_since(before: Present, temporary: Path) -> Leftovers:
    """Return what is left after everything had time to disappear."""
    end = time.monotonic() + SETTLING
    while True:
        _bury(before)
        left = Present.now(temporary).left(before)
        if left == Leftovers() or time.monotonic() > end:
            return left
        time.sleep(0.05)


def _bury(before: Present) -> None:
    """Reap orphans, as init does: this process has become their parent, and they may be dead already."""
    for pid in _ours() - before.processes:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _ours() -> set[int]:
    """Return the processes that carry the mark or descend from this one."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                marked.add(int(entry))
        except (OSError, ValueError):  # it has ended, or belongs to another user
            continue
    own = os.getpid()
    found = set()
    for pid in parents:
        above = pid
        while above in parents and above != own and above not in marked:
            above = parents[above]
        if above == own or above in marked:
            found.add(pid)
    return found - {own}


def _listening(pids: set[int]) -> set[str]:
    """Return the addresses on which one of these processes listens, each with its inode."""
    sockets = set()
    for pid in pids:
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                found.add(f"{_address(fields[1])} {fields[9]}")
    return found


def _address(field: str) -> str:
    host, _, port = field.partition(":")
    if len(host) == 8:
        return f"{socket.inet_ntoa(int(host, 16).to_bytes(4, 'little'))}:{int(port, 16)}"
    return f"[{host}]:{int(port, 16)}"
