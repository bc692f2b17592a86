"""A node of a cell is a host to which the user's ``--node-command`` leads: a network namespace, a container, ssh.

A fork server is started on each host from here. It tries this machine's addresses until one answers, and other hosts
reach it by the interface that leads there.
"""

from __future__ import annotations

import shlex
import sys

from harness.core.errors import LaunchError, PlanError
from harness.launch.launchers.base import Launcher, LauncherOptions
from harness.launch.remote.remote_pool import WORKER, RemotePool
from harness.launch.start_wait import Notify, ignore
from harness.worker.node_server import addresses

NUMBER = "{node}"
"""Stands for a node's number in the command, from 0."""


class HostsLauncher(Launcher):
    """Starts a fork server on each host by the user's command."""

    own_options = frozenset({"node_command"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        if not options.node_command or NUMBER not in options.node_command:
            raise PlanError(
                f"--launcher hosts: which command leads to a node? {NUMBER} stands for its number: "
                f"--node-command 'ip netns exec plumbline-{NUMBER}'"
            )
        self._command = options.node_command
        self.nodes: int = options.nodes
        self.machines = self.nodes

    def pool(self, locator: str, python: str | None) -> RemotePool:
        """Return a pool over all hosts."""
        return HostsPool(locator, python, self.nodes, self._command, self._notify)


class HostsPool(RemotePool):
    """Launches ranks of one subject on ``nodes`` hosts; ``command`` leads to each of them.

    Raises:
        LaunchError: this machine has no address that other hosts can reach.
    """

    def __init__(self, locator: str, python: str | None, nodes: int, command: str, notify: Notify = ignore) -> None:
        places = [address for address in addresses().values() if not address.startswith("127.")]
        if not places:
            raise LaunchError("this machine has no address by which other hosts could reach it: is its network up?")

        def start_commands(port: int) -> list[list[str]]:
            connect = [word for place in places for word in ("--connect", f"{place}:{port}")]
            server = [python or sys.executable, str(WORKER), *connect]
            return [
                [*shlex.split(command.replace(NUMBER, str(node))), *server, "--as-node", str(node), locator]
                for node in range(nodes)
            ]

        super().__init__(locator, nodes, start_commands, notify=notify)
