"""The fork server's registry of the processes that subjects start. Each of them keeps a connection to it."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Address = str | list[Any]
"""The address of a registry, as JSON: a name, or host and port."""

_REPORTED = ("below", "pid", "rank", "steps", "evidence", "failed", "idle", "unwritten")


@dataclass
class Child:
    """A process below a node's first process, and its reports about itself.

    ``below`` is the id of that first process. ``rank`` is the rank that this process (most probably) is. ``idle``: the
    process ended without having been a rank. ``unwritten`` says why its evidence could not be written. ``killed``: the
    server has killed the process.
    """

    line: socket.socket
    rest: bytes = b""
    below: int = 0
    pid: int = 0
    rank: int | None = None
    steps: int | None = None
    evidence: int | None = None
    failed: bool = False
    idle: bool = False
    unwritten: str | None = None
    killed: bool = False

    def receive(self) -> bool:
        try:
            chunk = self.line.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                if name in _REPORTED:
                    setattr(self, name, value)
        return bool(chunk)


def listen() -> tuple[socket.socket, Address]:
    """Return a socket that listens to other processes of this node, and its address.

    On Linux it is a Unix socket with an abstract name, because a node may be a network namespace or a container whose
    loopback interface is down. Every user can see such a name, so ``is_own`` checks who connects.
    """
    if sys.platform != "linux":
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        return listener, list(listener.getsockname())
    listener, name = socket.socket(socket.AF_UNIX), f"plumbline-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return listener, name


def is_own(line: socket.socket) -> bool:
    """Return whether the other end of a connection is a process of this user; True if unknown (not Linux)."""
    if sys.platform != "linux":
        return True
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def connect(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection((address[0], address[1]))
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"\0{address}")
    return line


class Registry:
    """Receives the reports of children in order, and passes them on."""

    def __init__(self, notify: Callable[[Child, bool], None]) -> None:
        """``notify`` is called with a child and False when it has written evidence, and with True when it has ended."""
        self._notify = notify
        self._listener, self.address = listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._selector.fileno()

    def read(self) -> bool:
        """Read all reports that have arrived; return True, because more may follow."""
        while self._follow(0):
            pass
        return True

    def wait_for_ends(self, first: int, seconds: float) -> None:
        """Read reports until all children of a node have ended, or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        self.read()
        while self.below(first) and (left := deadline - time.monotonic()) > 0:
            self._follow(left)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def below(self, first: int) -> list[Child]:
        """Return the living children of the node whose first process has the id ``first``."""
        children = [key.data for key in self._selector.get_map().values() if key.data is not None]
        return [child for child in children if child.below == first]

    def _follow(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)
        return bool(ready)

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        if not is_own(line):
            line.close()  # it could get this user's processes killed by registering their ids
            return
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, Child(line))

    def _receive(self, child: Child) -> None:
        had = child.evidence
        try:
            alive = child.receive()
        except (ValueError, AttributeError):
            alive = False  # it is not a child of a subject
        if child.evidence != had:
            self._notify(child, False)
        if not alive:
            self._selector.unregister(child.line)
            child.line.close()
            if child.below:
                self._notify(child, True)
