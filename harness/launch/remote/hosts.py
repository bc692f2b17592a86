"""Launches ranks on hosts to which a command leads: network namespaces, containers, whatever runs what follows it.

One fork server on each, as everywhere. It is started from here, tries this machine's addresses until one answers, and
is known by that way to others.
"""

from __future__ import annotations

import shlex
import sys

from harness.core.errors import LaunchError
from harness.launch.remote.pool import WORKER, RemotePool
from harness.worker.node_server import addresses

NUMBER = "{node}"
"""What stands for a node's number in the command, from 0."""


class HostsPool(RemotePool):
    """Launches ranks of one subject on ``nodes`` hosts; ``command`` leads to each of them."""

    def __init__(self, locator: str, python: str | None, nodes: int, command: str) -> None:
        places = [address for address in addresses().values() if not address.startswith("127.")]
        if not places:
            raise LaunchError("this machine has no address by which other hosts could reach it: is its network up?")

        def start(port: int) -> list[list[str]]:
            connect = [word for place in places for word in ("--connect", f"{place}:{port}")]
            server = [python or sys.executable, str(WORKER), *connect]
            return [
                [*shlex.split(command.replace(NUMBER, str(node))), *server, "--as-node", str(node), locator]
                for node in range(nodes)
            ]

        super().__init__(locator, nodes, start)
