"""The nodes of a cell are the nodes of the SLURM job that this process runs in.

For each pool, one step of srun starts a fork server on each node. Ranks get the variables that srun would set with one
task per rank, and keep the other variables that SLURM sets for their node, such as its visible devices.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, PlanError
from plumbline.core.invocation import command, suite_command
from plumbline.launch.launch_progress import LaunchedRankEnd, RunningLaunch
from plumbline.launch.pool import WORKER, Launcher, LauncherOptions
from plumbline.launch.remote.remote_pool import RemotePool
from plumbline.launch.start_wait import Notify, ignore


class SlurmLauncher(Launcher):
    """Starts a fork server on each node of the job with one step of srun."""

    own_options = frozenset({"listen"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        self.nodes: int = nodes_of_job()
        self.machines = self.nodes
        self._address = options.listen or address_towards(addresses_of_nodes())

    def pool(self, locator: str, python: str | None) -> RemotePool:
        return SlurmPool(locator, python, self.nodes, self._address, self._notify)


class SlurmPool(RemotePool):
    """Launches ranks of one subject on the nodes of this job. The nodes reach this machine at ``address``."""

    def __init__(self, locator: str, python: str | None, nodes: int, address: str, notify: Notify = ignore) -> None:
        def start_commands(port: int) -> list[list[str]]:
            return [srun(locator, python or sys.executable, nodes, f"{address}:{port}")]

        super().__init__(locator, nodes, start_commands, (address, 0), notify=notify)

    def finish(self, running: RunningLaunch) -> list[LaunchedRankEnd]:
        """Wait for the end of a launch, as every pool does.

        Raises:
            KeyboardInterrupt: SLURM is ending the job (cancelled, preempted, out of time, a failed node), so the way in
                which the launch ended says nothing about the trainer.
            LaunchError: The server of a node is gone.
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
        local_world = cell.parallelism.processes_per_node(cell.topology)
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
    count = variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES", "")
    if "SLURM_JOB_ID" not in variables or not count.isdecimal():
        here = shlex.join(suite_command("--launcher", "slurm"))
        raise PlanError(
            f"--launcher slurm: this process is not in a SLURM job. `{command('plumbline', 'submit')}` submits one; "
            f"or allocate nodes: salloc --nodes 2 --gpus-per-node 8 {here} …"
        )
    if shutil.which("srun") is None:
        raise PlanError(f"--launcher slurm: job {variables['SLURM_JOB_ID']} has no srun on its PATH")
    return int(count)


def addresses_of_nodes() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    query = ["scontrol", "--oneliner", "show", "nodes", nodes]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        shown = ""
    found = re.findall(r"\bNodeAddr=(\S+)", shown)
    if not found:
        raise PlanError(
            f"--launcher slurm: scontrol does not report the addresses of the job's nodes ({nodes or 'no list'}). Set "
            "the address at which they reach this machine: --listen ADDRESS"
        )
    return found


def stop_with_the_job() -> None:
    """Stop this run, as Ctrl-C would, if SLURM is ending the job."""
    job = os.environ["SLURM_JOB_ID"]
    query = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    states = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    if states and "RUNNING" not in states:
        raise KeyboardInterrupt(f"SLURM is ending job {job}: {states[0].lower()}")


def srun(locator: str, python: str, nodes: int, launcher: str) -> list[str]:
    """Return the command that starts a fork server on each node. The servers connect to ``launcher``.

    ``--overlap``: the pools of several subjects share the nodes.
    """
    return [
        *("srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--export=ALL", "--mpi=none", "--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1", "--quiet"),
        *(python, str(WORKER), "--connect", launcher, "--as-node", "${SLURM_NODEID}"),
        locator,
    ]


def address_towards(hosts: Iterable[str]) -> str:
    """Return the address from which this machine reaches all ``hosts`` (names or addresses)."""
    found: dict[str, str] = {}
    for host in hosts:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing; only looks up the route
                found[probe.getsockname()[0]] = host
        except OSError as error:
            raise PlanError(f"this machine cannot reach the node {host} ({error}): check the network") from error
    # One of the hosts may be this machine, which reaches itself from a loopback address.
    outside = {address: host for address, host in found.items() if not address.startswith("127.")} or found
    if len(outside) != 1:
        ways = ", ".join(f"{host} from {address}" for address, host in outside.items()) or "there are no nodes"
        raise PlanError(
            f"this machine reaches its nodes from several addresses ({ways}): choose one with --listen ADDRESS"
        )
    return next(iter(outside))
