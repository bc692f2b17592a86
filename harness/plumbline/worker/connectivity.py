"""Tests which other nodes this node can reach, and finds a free port here."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any


class ConnectivityProbe:
    """Answers the launcher's commands about the connections between its nodes."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event that answers ``command``: ``listen``, ``reach`` or ``port``.

        Other nodes reach this one if they can connect; their connections are never accepted.
        """
        if command["command"] == "listen":
            self.close()
            family = socket.AF_INET6 if ":" in command["address"] else socket.AF_INET
            self._listener = socket.create_server((command["address"], 0), family=family, backlog=1024)
            return {"event": "listens", "port": self._listener.getsockname()[1]}
        if command["command"] == "reach":
            return {"event": "reached", "failed": reach(command["peers"], command["seconds"])}
        from plumbline.trainer.environments import free_port  # it imports torch

        return {"event": "port", "port": free_port()}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def reach(peers: Mapping[str, Sequence[str | int]], seconds: float) -> dict[str, str]:
    """Connect to every (address, port) in parallel; return the reasons of those that failed, by key."""
    failed: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for key, (address, port) in peers.items():
            way = socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET)
            way.setblocking(False)
            code = way.connect_ex((address, port))
            if code in (0, errno.EINPROGRESS):
                selector.register(way, selectors.EVENT_WRITE, key)
            else:
                failed[key] = os.strerror(code)
                way.close()
        while (waiting := list(selector.get_map().values())) and (left := deadline - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                code = ready.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if code:
                    failed[ready.data] = os.strerror(code)
                selector.unregister(ready.fileobj)
                ready.fileobj.close()  # type: ignore[union-attr]
        for late in waiting:
            failed[late.data] = f"no answer in {seconds:g} s"
            late.fileobj.close()  # type: ignore[union-attr]
    return failed
