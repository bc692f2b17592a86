"""The fork server's ear for processes that subjects start by themselves: each has a line to it that ends as it ends."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Address = str | list[Any]
"""Where a registry is found: a name, or host and port. It travels as JSON."""

_SAID = ("below", "pid", "rank", "steps", "evidence", "failed", "idle", "unwritten")


@dataclass
class Child:
    """A process below a node's first one, and what it has said of itself.

    ``below`` is the process id of that first one. ``rank`` is the one that it is, or most probably is. ``idle``: it
    ended without having been a rank. ``unwritten`` says why its evidence could not be written. ``killed``: it did not
    end by itself, the server has ended it.
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

    def hear(self) -> bool:
        """Take in what it has said since; return whether it still lives."""
        try:
            chunk = self.line.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                if name in _SAID:
                    setattr(self, name, value)
        return bool(chunk)


def listen() -> tuple[socket.socket, Address]:
    """Return a socket on which a process hears others of its node, and where they find it.

    It is a name that no file stands for, where there are such names: a node may be a network namespace, or a container,
    in which nobody has brought up the loopback interface.
    """
    if sys.platform != "linux":
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        return listener, list(listener.getsockname())
    listener, name = socket.socket(socket.AF_UNIX), f"plumbline-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return listener, name


def connect(address: Address) -> socket.socket:
    """Return a line to the registry at ``address``."""
    if not isinstance(address, str):
        return socket.create_connection((address[0], address[1]))
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"\0{address}")
    return line


class Registry:
    """Hears of children in the order in which things happen to them, and passes it on."""

    def __init__(self, tell: Callable[[Child, bool], None]) -> None:
        """``tell`` is called with a child that left evidence or, and then with True, has ended."""
        self._tell = tell
        self._listener, self.address = listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is ready where there is something to follow."""
        return self._selector.fileno()

    def read(self) -> bool:
        """Take in all there is; there may always be more one day."""
        while self._follow(0):
            pass
        return True

    def see_off(self, first: int, seconds: float) -> None:
        """Take in what there is, and wait until all children of a node have ended, at most for so many seconds."""
        deadline = time.monotonic() + seconds
        self.read()
        while self.below(first) and (left := deadline - time.monotonic()) > 0:
            self._follow(left)

    def close(self) -> None:
        """Let go of everything: this process has nothing to do with any of it."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def below(self, first: int) -> list[Child]:
        """Return the living children of a node, by the process id of its first process."""
        children = [key.data for key in self._selector.get_map().values() if key.data is not None]
        return [child for child in children if child.below == first]

    def _follow(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)
        return bool(ready)

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        line.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, Child(line))

    def _hear(self, child: Child) -> None:
        had = child.evidence
        try:
            alive = child.hear()
        except (ValueError, AttributeError):
            alive = False  # nobody of ours
        if child.evidence != had:
            self._tell(child, False)
        if not alive:
            self._selector.unregister(child.line)
            child.line.close()
            if child.below:
                self._tell(child, True)
