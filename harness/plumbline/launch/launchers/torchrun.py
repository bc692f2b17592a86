"""Torchrun starts the nodes of a cell, here or by hand. They meet in its c10d rendezvous.

For each pool, torchrun starts one process per node: the node's fork server, which forks the ranks. If torchrun started
the ranks itself, every rank of every cell would import torch: 11 s instead of 0.35 s for eight ranks on two cores.
Ranks get the variables that torchrun would set for them, and inherit its own (``TORCHELASTIC_…``).
"""

from __future__ import annotations

import os
import shlex
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.launch import this_machine
from plumbline.launch.pool import WORKER, Launcher, LauncherOptions
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import START_TIMEOUT_S, Notify, ignore
from plumbline.launch.this_machine import new_store
from plumbline.worker.node_server import TOKEN
from plumbline.worker.scratch import RUN, Scratch

_RESTARTS = 3
"""How many times a torchrun that was started by hand may restart a node's lost server."""


class TorchrunLauncher(Launcher):
    """Starts a torchrun for each node here or, with --rendezvous, waits for nodes that the user starts."""

    own_options = frozenset({"rendezvous"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        self.nodes: int = options.nodes
        self.machines = self.nodes if options.rendezvous else 1
        self._place = parse_place(options.rendezvous) if options.rendezvous else None
        if self._place is None:
            return
        if options.subjects > 1:
            raise PlanError(
                f"--rendezvous: the command on each node serves one subject, but {options.subjects} were given: start "
                "a run for each subject"
            )
        if "PYTEST_XDIST_WORKER" in os.environ:
            raise PlanError("--rendezvous does not work with -n: the nodes serve a single process")
        self._store = new_store(self._place[0])

    def pool(self, locator: str, python: str | None) -> RemotePool:
        if self._place is None:
            return TorchrunPool(locator, python, self.nodes, self._notify)
        return self._pool_by_hand(locator, python, self._place)

    def _pool_by_hand(self, locator: str, python: str | None, place: tuple[str, int]) -> RemotePool:
        """Return a pool on nodes that the user starts, and show the command.

        The store of torchrun's rendezvous outlives the pool, so that nodes can come back after their server was lost.
        """
        given = os.environ.get(TOKEN)
        pool = _TorchrunRanks(locator, self.nodes, lambda port: [], place, given, self._notify)
        torchrun = [python, "-m", "torch.distributed.run"] if python else ["torchrun"]
        worker = [str(WORKER)] if python else ["-m", "plumbline.worker"]
        words = [*torchrun, *rendezvous(self.nodes, self._store, place[0]), "--max-restarts", str(_RESTARTS), *worker]
        words += server(f"{place[0]}:{place[1]}", locator)
        # The user's own secret is not shown, because output may be kept.
        token = f'"${TOKEN}"' if given else pool.token
        self._notify(
            f"waiting up to {START_TIMEOUT_S:.0f} s for {self.nodes} nodes; on each of them, in this folder, run\n"
            f"    {TOKEN}={token} {shlex.join(words)}"
        )
        return pool


class _TorchrunRanks(RemotePool):
    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        own = super().variables(cell, rank, oversubscribe)
        node = rank // cell.parallelism.processes_per_node(cell.topology)
        inherited = {name: value for name, value in own.items() if name not in this_machine.ELASTIC}
        return {**inherited, **this_machine.AGENT_STORE, "NODE_RANK": str(node)}


class TorchrunPool(_TorchrunRanks):
    """Launches ranks of one subject on ``nodes`` nodes simulated on this machine, with a torchrun for each."""

    def __init__(self, locator: str, python: str | None, nodes: int, notify: Notify = ignore) -> None:
        # This process serves the store, so that no other process can take the port before the first agent uses it.
        self._store = new_store(this_machine.loopback())
        # Without this folder, each agent would create one for its logs, and would not remove it.
        logs = Scratch.new(RUN)
        agent = [python or sys.executable, "-m", "torch.distributed.run", *rendezvous(nodes, self._store)]
        agent += ["--log-dir", logs.path]

        def start_commands(port: int) -> list[list[str]]:
            return [[*agent, str(WORKER), *server(f"{this_machine.loopback()}:{port}", locator)]] * nodes

        super().__init__(locator, nodes, start_commands, (this_machine.loopback(), 0), notify=notify, scratch=logs)

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        return super().variables(cell, rank, oversubscribe) | this_machine.own_devices(cell, rank, oversubscribe)


def rendezvous(nodes: int, store: TCPStore, host: str | None = None) -> list[str]:
    """Return torchrun's options for one process per node; nodes meet in ``store``."""
    endpoint = f"{host or store.host}:{store.port}"
    return ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]


def server(connect: str, locator: str) -> list[str]:
    """Return the arguments of a node's server. Only torchrun knows the number of the node."""
    return ["--connect", connect, "--as-node", "${GROUP_RANK}", locator]


def parse_place(given: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; raise ``PlanError`` if it is malformed."""
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlanError(f"--rendezvous {given}: must be an address of this machine and a port, such as node0:29400")
    return host, int(port)
