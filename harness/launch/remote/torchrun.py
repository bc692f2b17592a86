"""Launches ranks on nodes that torchrun starts, here or by somebody's hand, and that meet by its c10d rendezvous.

torchrun starts one process a node, the node's fork server, and not one a rank. An interpreter a rank would import torch
for every rank of every cell: some 11 s for a cell of eight ranks on two cores, where a fork takes 0.35 s, and a matrix
has hundreds of cells. A torchrun of its own for every cell could not be started by hand on each node at all. So one
torchrun lasts as long as the pool, and a cell's ranks, forked from what it started, are told what it would tell them
had it started one process a rank; what it says of itself (``TORCHELASTIC_…``) they inherit.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable

import torch.distributed

from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.launch.local import one_machine
from harness.launch.local.launcher import new_store
from harness.launch.pool import START_LIMIT
from harness.launch.remote.pool import WORKER, RemotePool
from harness.worker.node_server import TOKEN

_RESTARTS = 3
"""How often torchrun may start a node's server again that was lost, where it was started by hand."""


class TorchrunPool(RemotePool):
    """Launches ranks of one subject on ``nodes`` nodes, all of them this machine, by a torchrun for each."""

    def __init__(self, locator: str, python: str | None, nodes: int) -> None:
        # Held here, nobody can take its port before the first agent has it.
        self._meeting = new_store(one_machine.loopback())
        agent = [python or sys.executable, "-m", "torch.distributed.run", *rendezvous(nodes, self._meeting)]

        def start(port: int) -> list[list[str]]:
            return [[*agent, str(WORKER), *server(f"{one_machine.loopback()}:{port}", locator)]] * nodes

        super().__init__(locator, nodes, start)

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return what each rank is told; nodes that share this machine share out its devices."""
        told = as_told_by_torchrun(super().variables(cell, rank, oversubscribe), cell, rank)
        return told | one_machine.own_devices(cell, rank, oversubscribe)


class TorchrunByHand(RemotePool):
    """Launches ranks of one subject on nodes that somebody else starts; ``say`` is told how, before anybody waits.

    ``meeting`` is the store of torchrun's rendezvous, which outlives the pool: a node whose server was lost comes back.
    """

    def __init__(
        self,
        locator: str,
        python: str | None,
        nodes: int,
        place: tuple[str, int],
        meeting: torch.distributed.TCPStore,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(locator, nodes, lambda port: [], place, os.environ.get(TOKEN))
        torchrun = [python, "-m", "torch.distributed.run"] if python else ["torchrun"]
        worker = [str(WORKER)] if python else ["-m", "harness.worker"]
        where = rendezvous(nodes, meeting, place[0])
        words = [*torchrun, *where, "--max-restarts", str(_RESTARTS), *worker]
        words += server(f"{place[0]}:{place[1]}", locator)
        say(
            f"waiting up to {START_LIMIT:.0f} s for {nodes} nodes; on each of them, in this folder, run\n"
            f"    {TOKEN}={shlex.quote(self.token)} {shlex.join(words)}"
        )

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        """Return what each rank is told."""
        return as_told_by_torchrun(super().variables(cell, rank, oversubscribe), cell, rank)


def rendezvous(nodes: int, meeting: torch.distributed.TCPStore, host: str | None = None) -> list[str]:
    """Return torchrun's options for one process on each of ``nodes`` nodes that meet in the store ``meeting``."""
    at = f"{host or meeting.host}:{meeting.port}"
    return ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", at]


def server(connect: str, locator: str) -> list[str]:
    """Return the arguments of a node's server; which node it is, only torchrun knows."""
    return ["--connect", connect, "--as-node", "${GROUP_RANK}", locator]


def as_told_by_torchrun(variables: dict[str, str], cell: Cell, rank: int) -> dict[str, str]:
    """Leave to torchrun what it says of itself, and add what follows from the rank."""
    own = {name: value for name, value in variables.items() if name not in one_machine.ELASTIC}
    node = rank // cell.contract.processes_per_node(cell.topology)
    return {**own, **one_machine.AGENT_STORE, "NODE_RANK": str(node)}


def place_of(given: str) -> tuple[str, int]:
    """Return host and port of what the user typed.

    Raises:
        PlanError: they are not there.
    """
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlanError(f"--rendezvous {given}: an address of this machine and a port are wanted, as in node0:29400")
    return host, int(port)
