"""Launches a cell on this machine: simulated devices, or the CUDA devices it has."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from harness.core.cell import Cell
from harness.core.outcome import Outcome
from harness.core.trace import Exit, RankTrace, Trace
from harness.launch.pool import Pool, RankEnd, Running
from harness.launch.settings import Settings
from harness.store.traces import read_rank
from harness.worker.assignment import Assignment

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Checkpoint:
    """What a launch has to do with a checkpoint: stop after so many steps and leave one, or go on from it (None)."""

    folder: Path
    stop_after_step: int | None


@dataclass(frozen=True)
class Launched:
    """A cell that is being trained. ``store`` is where its ranks meet: it must live as long as they do."""

    pool: Pool
    running: Running
    assignments: tuple[Assignment, ...]
    store: torch.distributed.TCPStore
    folder: Path
    settings: Settings

    def trace(self) -> Trace:
        """Wait for the end and return the evidence.

        Raises:
            LaunchError: the pool's server is gone.
            TraceError: a rank's evidence cannot be read.
        """
        ends = self.pool.finish(self.running)
        ranks: list[RankTrace] = []
        exits: dict[int, Exit] = {}
        for assignment, end in zip(self.assignments, ends, strict=True):
            if end.evidence:
                ranks.append(read_rank(Path(assignment.evidence)))
            else:
                exits[end.rank] = _explain(end, Path(assignment.log), self.settings.time_limit)
        return Trace(tuple(ranks), exits, max(end.seconds for end in ends))

    def again(self, cell: Cell, part: str, checkpoint: Checkpoint) -> Trace:
        """Train ``cell`` on the same pool up to a checkpoint or from it; the evidence goes into a folder of its own.

        Raises:
            LaunchError, TraceError: as in :func:`start` and :meth:`trace`.
        """
        return start(self.pool, cell, self.folder / part, self.settings, checkpoint).trace()


def start(
    pool: Pool,
    cell: Cell,
    folder: Path,
    settings: Settings,
    checkpoint: Checkpoint | None = None,
) -> Launched:
    """Begin to train ``cell``; its evidence will lie in ``folder``, a file a rank.

    Raises:
        LaunchError: the pool's server is gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = _store()
    number = pool.next_launch()
    comm = "nccl" if cell.accelerator == "cuda" and not settings.oversubscribe else "gloo"
    assignments = tuple(
        Assignment(
            launch=number,
            cell=cell,
            rank=rank,
            comm=comm,
            devices=_devices(cell, rank, settings.oversubscribe),
            environment=_environment(cell, rank, store.port, settings.oversubscribe),
            evidence=str(folder / f"rank-{rank}.safetensors"),
            log=str(folder / f"rank-{rank}.log"),
            checkpoint_dir=str(checkpoint.folder) if checkpoint else None,
            stop_after_step=checkpoint.stop_after_step if checkpoint else None,
            resume=checkpoint is not None and checkpoint.stop_after_step is None,
            sketch_above=settings.sketch_above,
        )
        for rank in range(cell.processes)
    )
    running = pool.begin(cell.subject, assignments, settings.time_limit)
    return Launched(pool, running, assignments, store, folder, settings)


def launch(pool: Pool, cell: Cell, folder: Path, settings: Settings) -> Trace:
    """Train ``cell`` once and return its evidence; see :func:`start` and :meth:`Launched.trace`."""
    return start(pool, cell, folder, settings).trace()


def _store() -> torch.distributed.TCPStore:
    """Return a store for one launch's rendezvous. Ranks join it as they join the one that torchrun's agent holds.

    The socket listens, on loopback, before anybody is told the port: nobody can take it in between. It is an IPv4
    one because a dual-stack socket's addresses have names that only a DNS server could tell.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _devices(cell: Cell, rank: int, oversubscribe: bool) -> tuple[str, ...]:
    """Return the names under which this rank finds its devices."""
    spread = cell.contract.devices_per_process(cell.topology)
    if cell.accelerator == "cpu":
        return ("cpu",) * spread
    if oversubscribe:
        present = torch.cuda.device_count()
        return tuple(f"cuda:{(rank * spread + i) % present}" for i in range(spread))
    first = 0 if spread > 1 else rank % cell.contract.processes_per_node(cell.topology)
    return tuple(f"cuda:{first + i}" for i in range(spread))


def _environment(cell: Cell, rank: int, port: int, oversubscribe: bool) -> dict[str, str]:
    """Return the variables that torchrun sets for this rank.

    Nodes that share a machine each see their own CUDA devices only, as nodes of their own would.
    """
    local_world = cell.contract.processes_per_node(cell.topology)
    node = rank // local_world
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_world,
        "GROUP_RANK": node,
        "ROLE_RANK": rank,
        "WORLD_SIZE": cell.processes,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_WORLD_SIZE": cell.topology.num_nodes,
        "ROLE_WORLD_SIZE": cell.processes,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "plumbline",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": 1,
        # Names of network interfaces are the machine's affair; ranks on one machine meet on loopback.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    if cell.accelerator == "cuda" and cell.topology.num_nodes > 1 and not oversubscribe:
        every = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if every == [""]:
            every = [str(device) for device in range(torch.cuda.device_count())]
        first = node * cell.topology.gpus
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(every[first : first + cell.topology.gpus])
    return {name: str(value) for name, value in variables.items()}


def _explain(end: RankEnd, log: Path, time_limit: float) -> Exit:
    tail = log.read_bytes()[-1500:].decode(errors="replace").strip() if log.exists() else ""
    if end.code is None:
        return Exit(Outcome.TIMED_OUT, f"no evidence after {time_limit:.0f} s; it said last:\n{tail}")
    how = f"killed by signal {-end.code}" if end.code < 0 else f"ended with exit code {end.code}"
    return Exit(Outcome.CRASHED, f"{how} before its evidence was complete; it said last:\n{tail}")
