"""The nodes of a cell are hosts that ``--node-command`` reaches: network namespaces, containers, or hosts by ssh.

The command starts a fork server on each host, which connects to this machine's address. Hosts reach each other through
the interfaces that lead to this machine. A server reads its secret from standard input, which ssh encrypts.
"""

from __future__ import annotations

import shlex
import sys

from plumbline.core.errors import PlanError
from plumbline.launch.pool import WORKER, Launcher, LauncherOptions
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.worker.node_server import addresses

NUMBER = "{node}"
"""The placeholder for a node's number, from 0, in the command."""


class HostsLauncher(Launcher):
    """Starts a fork server on each host with the user's command."""

    own_options = frozenset({"node_command", "listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        if not options.node_command or NUMBER not in options.node_command:
            raise PlanError(
                f"--launcher hosts needs the command that reaches a node, with {NUMBER} for its number: "
                f"--node-command 'ip netns exec plumbline-{NUMBER}'"
            )
        self._command = options.node_command
        self._address = options.listen or only_address()
        self.nodes: int = options.nodes
        self.machines = self.nodes

    def pool(self, locator: str, python: str | None) -> RemotePool:
        def start_commands(port: int) -> list[list[str]]:
            connect = ["--token-from-stdin", "--connect", f"{self._address}:{port}"]
            server = [python or sys.executable, str(WORKER), *connect]
            return [
                [*shlex.split(self._command.replace(NUMBER, str(node))), *server, "--as-node", str(node), locator]
                for node in range(self.nodes)
            ]

        place = (self._address, 0)
        return RemotePool(locator, self.nodes, start_commands, place, notify=self._notify, token_on_stdin=True)


def only_address() -> str:
    """Return this machine's IPv4 address other than loopback; raise ``PlanError`` if it has none or several."""
    found = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise PlanError("this machine has no address at which other hosts could reach it: check its network")
    named = ", ".join(f"{address} on {name}" for name, address in found.items())
    raise PlanError(
        f"this machine has several addresses ({named}): choose the one at which hosts reach it with --listen ADDRESS"
    )
