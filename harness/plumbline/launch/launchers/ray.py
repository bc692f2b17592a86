"""A node of a cell is a node of a Ray cluster: the one of RAY_ADDRESS, or else one that is started here and ended.

One driver of Ray lasts as long as the pool (``plumbline.launch.remote.ray_nodes``). Ray places and starts a fork server
on each node, and after a node was lost, on others. A cell's ranks are forked from it where Ray put it; what Ray set for
a node (its CUDA devices first of all) stays as it is. The driver is a process of its own, because Ray's client starts
threads and handles signals.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from plumbline.core.errors import PlanError
from plumbline.core.invocation import command
from plumbline.launch import remote
from plumbline.launch.launchers.base import Launcher, LauncherOptions
from plumbline.launch.pool import SERVER_ENVIRONMENT, WORKER
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import START_TIMEOUT_S, Notify, ignore
from plumbline.launch.this_machine import loopback
from plumbline.worker.node_server import CONNECT_TIMEOUT_S
from plumbline.worker.scratch import NODE, Scratch

ADDRESS = "RAY_ADDRESS"
"""The variable with the address of the cluster's head, HOST:PORT; without it there is no cluster yet."""

DRIVER = Path(remote.__file__).with_name("ray_nodes.py")


@dataclass(frozen=True)
class RayCluster:
    """The cluster at ``address``, None: one is started for each pool. It reaches this process at ``launcher``."""

    address: str | None
    launcher: str


@dataclass(frozen=True)
class NodeRequest:
    """What a pool asks Ray for: ``count`` nodes with these ``resources`` each, by Ray's names of them.

    ``groups`` is how many pools of this session will ask for the same.
    """

    count: int
    resources: Mapping[str, int]
    groups: int = 1


class RayLauncher(Launcher):
    """Has Ray start a fork server on each node, in a placement group for each pool."""

    own_options = frozenset({"listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        if importlib.util.find_spec("ray") is None:
            raise PlanError(f"--launcher ray: {sys.executable} has no Ray: {command('pip', 'install', 'ray')}")
        found = find_cluster(os.environ.get(ADDRESS, ""))
        self._cluster = replace(found, launcher=options.listen or found.launcher)
        self.nodes: int = options.nodes
        self.machines = self.nodes if self._cluster.address else 1
        needed = {"CPU": options.gpus, "GPU": options.cuda_devices}
        # A placement group must ask for something. A byte is free where no CPU is.
        resources = {name: count for name, count in needed.items() if count} or {"memory": 1}
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._request = NodeRequest(self.nodes, resources, workers * options.subjects)
        self._started: set[str] = set()

    def pool(self, locator: str, python: str | None) -> RemotePool:
        """Return a pool over so many nodes; one that replaces a lost pool waits for its nodes to come back."""
        again = locator in self._started
        self._started.add(locator)
        return RayPool(locator, python, self._cluster, self._request, self._notify, again=again)


class RayPool(RemotePool):
    """Launches ranks of one subject on nodes of a Ray cluster.

    ``again``: it replaces a pool that was lost, so a cluster with too few nodes is waited for, and not refused.
    """

    def __init__(
        self,
        locator: str,
        python: str | None,
        cluster: RayCluster,
        request: NodeRequest,
        notify: Notify = ignore,
        *,
        again: bool = False,
    ) -> None:
        # Not in the temporary directory: it names sockets, whose paths must be short.
        self._scratch = None if cluster.address else Scratch.new(NODE, "/tmp")
        where = ["--temp-dir", self._scratch.path] if self._scratch else ["--address", str(cluster.address)]
        asked = ["--nodes", str(request.count), "--resources", json.dumps(dict(request.resources))]
        asked += ["--groups", str(0 if again else request.groups), "--timeout", str(START_TIMEOUT_S)]
        asked += ["--environment", json.dumps(SERVER_ENVIRONMENT)]

        def start_commands(port: int) -> list[list[str]]:
            connect = ["--token-from-stdin", "--connect", f"{cluster.launcher}:{port}"]
            server = [python or sys.executable, str(WORKER), *connect, locator]
            return [[sys.executable, str(DRIVER), *where, *asked, *server]]

        place = cluster.launcher, 0
        super().__init__(locator, request.count, start_commands, place, notify=notify, token_on_stdin=True)

    def close(self) -> None:
        """End every node's server and the driver; a cluster that was started for this pool ends with that."""
        super().close()
        if self._scratch:
            self._scratch.leave(remove=True)
            self._scratch = None


def find_cluster(address: str) -> RayCluster:
    """Return the cluster whose head is at ``address``, or for "" that there is none yet.

    Raises:
        PlanError: this is no address, or nothing answers there.
    """
    if not address:
        return RayCluster(None, loopback())
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise PlanError(
            f"{ADDRESS}={address}: the address of the cluster's head is wanted, HOST:PORT, as `ray start --head` shows "
            "it; leave it out to start a cluster on this machine"
        )
    try:
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
            return RayCluster(address, connection.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise PlanError(f"{ADDRESS}={address}: there is no Ray cluster, or no way to it: {error}") from error
