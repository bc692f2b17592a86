"""The nodes of a cell are nodes of a Ray cluster: the cluster at RAY_ADDRESS, or one that each pool starts here.

Each pool has a driver of Ray (``plumbline.launch.remote.ray_nodes``), in a separate process because Ray's client starts
threads and handles signals. Ray starts a fork server on each node, and uses other nodes after one was lost. Ranks keep
the variables that Ray sets for their node, such as its visible devices.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

from plumbline.core.errors import PlanError
from plumbline.core.invocation import command
from plumbline.launch import remote
from plumbline.launch.pool import SERVER_ENVIRONMENT, WORKER, Launcher, LauncherOptions
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import START_TIMEOUT_S
from plumbline.launch.this_machine import loopback
from plumbline.worker.node_server import CONNECT_TIMEOUT_S
from plumbline.worker.scratch import NODE, Scratch

ADDRESS = "RAY_ADDRESS"
"""The variable with the address of the cluster's head, HOST:PORT."""

DRIVER = Path(remote.__file__).with_name("ray_nodes.py")


class RayLauncher(Launcher):
    """Lets Ray start a fork server on each node, with a placement group per pool."""

    own_options = frozenset({"listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        if importlib.util.find_spec("ray") is None:
            raise PlanError(
                f"--launcher ray: {sys.executable} has no Ray. Install it: {command('pip', 'install', 'ray')}"
            )
        self._cluster, own_address = find_cluster(os.environ.get(ADDRESS, ""))
        self._address = options.listen or own_address
        self.nodes: int = options.nodes
        self.machines = self.nodes if self._cluster else 1
        needed = {"CPU": options.gpus, "GPU": options.devices}
        # A placement group must request something; one byte of memory is always free.
        resources = {name: count for name, count in needed.items() if count} or {"memory": 1}
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._groups = workers * options.subjects
        self._request = ["--nodes", str(self.nodes), "--resources", json.dumps(resources)]
        self._started: set[str] = set()

    def pool(self, locator: str, python: str | None) -> RemotePool:
        """Return a pool over all nodes. A pool that replaces a lost one waits until enough nodes are back."""
        groups = 0 if locator in self._started else self._groups
        self._started.add(locator)
        # Not in the temporary directory, because the paths of Ray's sockets must be short.
        scratch = None if self._cluster else Scratch.new(NODE, "/tmp")
        driver = [sys.executable, str(DRIVER)]
        driver += ["--temp-dir", scratch.path] if scratch else ["--address", str(self._cluster)]
        driver += [*self._request, "--groups", str(groups)]
        driver += ["--timeout", str(START_TIMEOUT_S), "--environment", json.dumps(SERVER_ENVIRONMENT)]

        def start_commands(port: int) -> list[list[str]]:
            connect = ["--token-from-stdin", "--connect", f"{self._address}:{port}"]
            return [[*driver, python or sys.executable, str(WORKER), *connect, locator]]

        place = (self._address, 0)
        return RemotePool(
            locator, self.nodes, start_commands, place, notify=self._notify, token_on_stdin=True, scratch=scratch
        )


def find_cluster(address: str) -> tuple[str | None, str]:
    """Return the address of the cluster's head (None if pools start clusters), and this machine's for the nodes."""
    if not address:
        return None, loopback()
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise PlanError(
            f"{ADDRESS}={address}: set it to the address of the cluster's head, HOST:PORT, which `ray start --head` "
            "shows, or unset it to start a cluster on this machine"
        )
    try:
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
            return address, connection.getsockname()[0]
    except (OSError, OverflowError) as error:
        raise PlanError(f"{ADDRESS}={address}: no Ray cluster can be reached there: {error}") from error
