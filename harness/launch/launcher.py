"""How ranks come to life: on this machine, or on the nodes of a cluster. The registry of ``--launcher``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Protocol

from harness.core.errors import PlanError
from harness.launch.pool import Pool
from harness.launch.slurm import SlurmPool, nodes_of_job


class Launcher(Protocol):
    """Makes the pools of a session.

    ``nodes``: how many machines there are, None where one plays every node. On several, evidence must lie in a folder
    that all of them see.
    """

    nodes: int | None

    def pool(self, locator: str, python: str | None) -> Pool:
        """Begin to warm up a pool for the subjects behind ``locator``, in the interpreter ``python`` or this one."""


class Local:
    """Every node of a cell is this machine."""

    nodes = None

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool of this machine."""
        return Pool(locator, python)


class Slurm:
    """A node of a cell is a node of the SLURM job that this process runs in."""

    def __init__(self) -> None:
        self.nodes: int = nodes_of_job()

    def pool(self, locator: str, python: str | None) -> Pool:
        """Return a pool over all nodes of the job."""
        return SlurmPool(locator, python, self.nodes)


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"local": Local, "slurm": Slurm}


def find_launcher(name: str) -> Launcher:
    """Return the launcher of this name.

    Raises:
        PlanError: there is none, or it cannot work here.
    """
    if name not in LAUNCHERS:
        close = difflib.get_close_matches(name, LAUNCHERS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(LAUNCHERS)}"
        raise PlanError(f"there is no launcher {name!r}: {hint}")
    return LAUNCHERS[name]()


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
