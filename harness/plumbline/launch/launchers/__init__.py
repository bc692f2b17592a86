"""The launchers of ``--launcher`` by name. A new launcher is one file here, and one entry of ``LAUNCHERS``.

A launcher makes pools; the pools start the ranks (``plumbline.launch.pool``, ``plumbline.launch.remote``).
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.named_registry import check_choice
from plumbline.launch.launchers.hosts import HostsLauncher
from plumbline.launch.launchers.ray import RayLauncher
from plumbline.launch.launchers.slurm import SlurmLauncher
from plumbline.launch.launchers.torchrun import TorchrunLauncher
from plumbline.launch.pool import Launcher, LauncherOptions, LocalLauncher, Pool
from plumbline.launch.remote.node_checks import too_few_devices
from plumbline.launch.remote.remote_pool import RemotePool

LAUNCHERS: dict[str, type[Launcher]] = {
    "local": LocalLauncher,
    "torchrun": TorchrunLauncher,
    "slurm": SlurmLauncher,
    "hosts": HostsLauncher,
    "ray": RayLauncher,
}


def find_launcher(name: str, options: LauncherOptions | None = None) -> Launcher:
    options = options or LauncherOptions()
    check_choice("launcher", name, {one: launcher.own_options for one, launcher in LAUNCHERS.items()}, options)
    return LAUNCHERS[name](options)


def check_nodes(wanted: int, launcher: Launcher) -> None:
    """Raise ``PlanError`` if the launcher has fewer nodes than ``wanted``."""
    if launcher.nodes is not None and wanted > launcher.nodes:
        raise PlanError(
            f"cells of {wanted} nodes were requested, but the job has {launcher.nodes}: use --nodes {launcher.nodes} "
            "(--gpus counts devices per node), or request more nodes"
        )


def check_devices_of_nodes(cells: Iterable[Cell], pools: Iterable[Pool], *, oversubscribe: bool) -> None:
    """Raise ``PlanError`` if a node has too few devices for one of the cells."""
    wanted = [(cell.accelerator, cell.topology) for cell in cells if cell.accelerator != "cpu"]
    for pool in pools:
        if isinstance(pool, RemotePool):
            for accelerator, topology in wanted:
                nodes = pool.nodes[: topology.num_nodes]
                reason = too_few_devices(nodes, accelerator, 1 if oversubscribe else topology.gpus)
                if reason:
                    raise PlanError(reason)
