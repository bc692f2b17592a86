"""How ranks come to life: on this machine, or on the nodes of a cluster. The registry of ``--launcher``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.launch.local.launcher import new_store
from harness.launch.pool import Pool
from harness.launch.remote.hosts import NUMBER, HostsPool
from harness.launch.remote.node_checks import too_few_devices
from harness.launch.remote.pool import RemotePool
from harness.launch.remote.slurm import SlurmPool, nodes_of_job
from harness.launch.remote.torchrun import TorchrunByHand, TorchrunPool, place_of


@dataclass(frozen=True)
class Asked:
    """What a launcher is asked for.

    ``nodes`` is the largest number of them in any cell, and ``subjects`` how many pools there will be. ``rendezvous``
    and ``node_command`` are the options of these names. ``say`` tells the user something at once.
    """

    nodes: int = 1
    subjects: int = 1
    rendezvous: str | None = None
    node_command: str | None = None
    say: Callable[[str], None] = print


class Launcher(Protocol):
    """Makes the pools of a session.

    ``nodes``: how many there are, None where there are as many as a cell wants. Where there is a number, evidence lies
    in a folder that all of them see. ``machines``: how many of them have devices of their own.
    """

    nodes: int | None
    machines: int

    def pool(self, locator: str, python: str | None) -> Pool:
        """Begin to warm up a pool for the subjects behind ``locator``, in the interpreter ``python`` or this one."""


class Local:
    """Every node of a cell is this machine."""

    nodes = None
    machines = 1

    def __init__(self, asked: Asked) -> None:
        pass

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool of this machine."""
        return Pool(locator, python)


class Slurm:
    """A node of a cell is a node of the SLURM job that this process runs in."""

    def __init__(self, asked: Asked) -> None:
        self.nodes: int = nodes_of_job()
        self.machines = self.nodes

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool over all nodes of the job."""
        return SlurmPool(locator, python, self.nodes)


class Torchrun:
    """A node of a cell is a node that torchrun started, here, or with --rendezvous by anybody's hand."""

    def __init__(self, asked: Asked) -> None:
        self.nodes: int = asked.nodes
        self.machines = self.nodes if asked.rendezvous else 1
        self._say = asked.say
        self._place = place_of(asked.rendezvous) if asked.rendezvous else None
        if self._place is None:
            return
        if asked.subjects > 1:
            raise PlanError(
                f"--rendezvous: {asked.subjects} subjects were named, and what is started on each node is the server "
                "of one: make a run for each"
            )
        if "PYTEST_XDIST_WORKER" in os.environ:
            raise PlanError("--rendezvous: the nodes are started for one process, so leave -n out")
        self._meeting = new_store("")

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool over all nodes."""
        if self._place is None:
            return TorchrunPool(locator, python, self.nodes)
        return TorchrunByHand(locator, python, self.nodes, self._place, self._meeting, self._say)


class Hosts:
    """A node of a cell is a host to which the user's --node-command leads."""

    def __init__(self, asked: Asked) -> None:
        if not asked.node_command or NUMBER not in asked.node_command:
            raise PlanError(
                f"--launcher hosts: which command leads to a node? {NUMBER} stands for its number: "
                f"--node-command 'ip netns exec plumbline-{NUMBER}'"
            )
        self._command = asked.node_command
        self.nodes: int = asked.nodes
        self.machines = self.nodes

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool over all hosts."""
        return HostsPool(locator, python, self.nodes, self._command)


LAUNCHERS: dict[str, Callable[[Asked], Launcher]] = {
    "local": Local,
    "torchrun": Torchrun,
    "slurm": Slurm,
    "hosts": Hosts,
}

_OPTIONS = {"rendezvous": "torchrun", "node_command": "hosts"}


def find_launcher(name: str, asked: Asked | None = None) -> Launcher:
    """Return the launcher of this name.

    Raises:
        PlanError: there is none, it cannot work here, or what was asked for is another one's.
    """
    asked = asked or Asked()
    if name not in LAUNCHERS:
        close = difflib.get_close_matches(name, LAUNCHERS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(LAUNCHERS)}"
        raise PlanError(f"there is no launcher {name!r}: {hint}")
    for option, own in _OPTIONS.items():
        if getattr(asked, option) and name != own:
            raise PlanError(f"--{option.replace('_', '-')} is for --launcher {own}, not for {name}")
    return LAUNCHERS[name](asked)


def check_nodes(wanted: int, launcher: Launcher) -> None:
    """Refuse cells of more nodes than there are.

    Raises:
        PlanError: with the way out.
    """
    if launcher.nodes is not None and wanted > launcher.nodes:
        raise PlanError(
            f"cells of {wanted} nodes were asked for, and the job has {launcher.nodes}: take --nodes {launcher.nodes} "
            "(with --gpus for each node), or ask for more nodes"
        )


def check_devices_of_nodes(cells: Iterable[Cell], pools: Iterable[Pool], *, oversubscribe: bool) -> None:
    """Refuse cells of which a node has too few CUDA devices, as where it has 4 and the others have 8.

    Raises:
        PlanError: with every node's number of them.
    """
    wanted = [cell.topology for cell in cells if cell.accelerator == "cuda"]
    for pool in pools:
        for topology in wanted if isinstance(pool, RemotePool) else ():
            reason = too_few_devices(pool.nodes[: topology.num_nodes], 1 if oversubscribe else topology.gpus)
            if reason:
                raise PlanError(reason)
