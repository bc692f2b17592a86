"""A node of a cell is a host to which the user's ``--node-command`` leads: a network namespace, a container, ssh.

A fork server is started on each host from here. It connects to this machine's address, and other hosts reach it by the
interface that leads there. The secret that it needs for that comes on its standard input, which ssh encrypts.
"""

from __future__ import annotations

import shlex
import sys

from plumbline.core.errors import PlanError
from plumbline.launch.launchers.base import Launcher, LauncherOptions
from plumbline.launch.pool import WORKER
from plumbline.launch.remote.own_address import only_address
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import Notify, ignore

NUMBER = "{node}"
"""Stands for a node's number in the command, from 0."""


class HostsLauncher(Launcher):
    """Starts a fork server on each host by the user's command."""

    own_options = frozenset({"node_command", "listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        if not options.node_command or NUMBER not in options.node_command:
            raise PlanError(
                f"--launcher hosts: which command leads to a node? {NUMBER} stands for its number: "
                f"--node-command 'ip netns exec plumbline-{NUMBER}'"
            )
        self._command = options.node_command
        self._address = options.listen or only_address()
        self.nodes: int = options.nodes
        self.machines = self.nodes

    def pool(self, locator: str, python: str | None) -> RemotePool:
        return HostsPool(locator, python, self.nodes, self._command, self._address, self._notify)


class HostsPool(RemotePool):
    """Launches ranks of one subject on ``nodes`` hosts, to each of which ``command`` leads.

    They reach this machine at ``address``.
    """

    def __init__(
        self, locator: str, python: str | None, nodes: int, command: str, address: str, notify: Notify = ignore
    ) -> None:
        def start_commands(port: int) -> list[list[str]]:
            server = [python or sys.executable, str(WORKER), "--token-from-stdin", "--connect", f"{address}:{port}"]
            return [
                [*shlex.split(command.replace(NUMBER, str(node))), *server, "--as-node", str(node), locator]
                for node in range(nodes)
            ]

        super().__init__(locator, nodes, start_commands, (address, 0), notify=notify, token_on_stdin=True)
