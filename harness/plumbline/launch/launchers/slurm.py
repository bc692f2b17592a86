"""A node of a cell is a node of the SLURM job that this process runs in.

One step of srun starts a fork server on each node and lasts as long as the pool. A cell's ranks are forked from it
where SLURM put it, and get the variables that srun would set had it started one task a rank. What SLURM set for a node
(its CUDA devices first of all) stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, PlanError
from plumbline.core.invocation import command, suite_command
from plumbline.launch.launch_progress import LaunchedRankEnd, RunningLaunch
from plumbline.launch.launchers.base import Launcher, LauncherOptions
from plumbline.launch.pool import WORKER
from plumbline.launch.remote.own_address import address_towards
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import Notify, ignore


class SlurmLauncher(Launcher):
    """Starts a fork server on each node of the job by one step of srun."""

    own_options = frozenset({"listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        self.nodes: int = nodes_of_job()
        self.machines = self.nodes
        self._address = options.listen or address_towards(addresses_of_nodes())

    def pool(self, locator: str, python: str | None) -> RemotePool:
        return SlurmPool(locator, python, self.nodes, self._address, self._notify)


class SlurmPool(RemotePool):
    """Launches ranks of one subject on the nodes of this job, which reach this machine at ``address``."""

    def __init__(self, locator: str, python: str | None, nodes: int, address: str, notify: Notify = ignore) -> None:
        def start_commands(port: int) -> list[list[str]]:
            return [srun(locator, python or sys.executable, nodes, f"{address}:{port}")]

        super().__init__(locator, nodes, start_commands, (address, 0), notify=notify)

    def finish(self, running: RunningLaunch) -> list[LaunchedRankEnd]:
        """Follow a launch to its end, as every pool does; a launch that SLURM ended is no finding about a trainer.

        Raises:
            KeyboardInterrupt: the job is being ended: cancelled, preempted, out of time, or a node of it failed.
            LaunchError: a node's server is gone.
        """
        try:
            ends = super().finish(running)
        except LaunchError:
            stop_with_the_job()
            raise
        if not all(end.evidence for end in ends):
            stop_with_the_job()
        return ends

    def variables(self, cell: Cell, rank: int, oversubscribe: bool) -> dict[str, str]:
        local_world = cell.contract.processes_per_node(cell.topology)
        nodes = cell.topology.num_nodes
        hosts = ",".join(self.hosts[:nodes])
        from_srun = {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank % local_world,
            "SLURM_NODEID": rank // local_world,
            "SLURM_NTASKS": cell.processes,
            "SLURM_NPROCS": cell.processes,
            "SLURM_NTASKS_PER_NODE": local_world,
            "SLURM_TASKS_PER_NODE": f"{local_world}(x{nodes})" if nodes > 1 else local_world,
            "SLURM_NNODES": nodes,
            "SLURM_NODELIST": hosts,
            "SLURM_STEP_NUM_TASKS": cell.processes,
            "SLURM_STEP_NUM_NODES": nodes,
            "SLURM_STEP_NODELIST": hosts,
        }
        return super().variables(cell, rank, oversubscribe) | {name: str(value) for name, value in from_srun.items()}


def nodes_of_job(variables: Mapping[str, str] = os.environ) -> int:
    """Return how many nodes the SLURM job has that this process runs in.

    Raises:
        PlanError: it runs in none, or srun cannot be found.
    """
    count = variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES", "")
    if "SLURM_JOB_ID" not in variables or not count.isdecimal():
        here = shlex.join(suite_command("--launcher", "slurm"))
        raise PlanError(
            f"--launcher slurm: this process is in no SLURM job. `{command('plumbline', 'submit')}` makes one, "
            f"or ask for nodes first: salloc --nodes 2 --gpus-per-node 8 {here} …"
        )
    if shutil.which("srun") is None:
        raise PlanError(f"--launcher slurm: job {variables['SLURM_JOB_ID']} has no srun on its PATH")
    return int(count)


def addresses_of_nodes() -> list[str]:
    """Return the addresses of the job's nodes, or names that lead to them, as SLURM knows them.

    Raises:
        PlanError: it does not tell.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    query = ["scontrol", "--oneliner", "show", "nodes", nodes]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        shown = ""
    found = re.findall(r"\bNodeAddr=(\S+)", shown)
    if not found:
        raise PlanError(
            f"--launcher slurm: scontrol does not tell the addresses of the job's nodes ({nodes or 'no list'}): name "
            "the address of this machine at which they reach it, --listen ADDRESS"
        )
    return found


def stop_with_the_job() -> None:
    """Stop this process as Ctrl-C would, if SLURM is ending the job that it runs in.

    Raises:
        KeyboardInterrupt: it is. A run stopped this way has no footer, and its last cell is examined again.
    """
    job = os.environ["SLURM_JOB_ID"]
    query = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    states = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    if states and "RUNNING" not in states:
        raise KeyboardInterrupt(f"SLURM is ending job {job}: {states[0].lower()}")


def srun(locator: str, python: str, nodes: int, launcher: str) -> list[str]:
    """Return the command that starts a fork server on each node of the job, which connects to ``launcher``.

    ``--overlap``: the pools of several subjects share the job's nodes.
    """
    return [
        *("srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--export=ALL", "--mpi=none", "--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1", "--quiet"),
        *(python, str(WORKER), "--connect", launcher, "--as-node", "${SLURM_NODEID}"),
        locator,
    ]
