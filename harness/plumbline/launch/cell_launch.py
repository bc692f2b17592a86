"""Launches a cell on a pool, and collects the trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.devices.counting import count
from plumbline.devices.types import backend_of
from plumbline.evidence.read import read_rank, whole_tensors
from plumbline.evidence.tensor_store import FOLDER
from plumbline.evidence.trace import STORE_ABOVE, Exit, RankTrace, Trace
from plumbline.launch.exit_reason import explain, gather, take_so_far, without_unfinished
from plumbline.launch.launch_progress import RunningLaunch
from plumbline.launch.pool import Pool
from plumbline.launch.this_machine import new_store, torchrun_variables
from plumbline.own_workloads.load import workload_of
from plumbline.worker.assignment import Assignment


@dataclass(frozen=True)
class Settings:
    """The settings of every launch.

    ``time_limit`` is in seconds per launch. With ``oversubscribe``, ranks share devices; on CUDA, they then communicate
    over gloo. Weights and gradients with more than ``store_above`` entries are written once for all ranks that have
    equal values.
    """

    time_limit: float = 120.0
    oversubscribe: bool = False
    store_above: int = STORE_ABOVE


@dataclass(frozen=True)
class CheckpointRequest:
    """A launch that saves a checkpoint to ``folder`` and stops after ``stop_after_step`` steps.

    If ``stop_after_step`` is None, the launch resumes from the checkpoint in ``folder`` instead.
    """

    folder: Path
    stop_after_step: int | None


@dataclass(frozen=True)
class CellLaunch:
    """A cell in training. Each of ``assignments`` has one process.

    ``store`` is the ranks' rendezvous store, which must outlive them; None if the subject starts its ranks itself.
    """

    pool: Pool
    running: RunningLaunch
    assignments: tuple[Assignment, ...]
    store: TCPStore | None
    folder: Path
    settings: Settings

    def wait_for_trace(self) -> Trace:
        """Wait for the end of the launch, and return its evidence.

        Removes the evidence of ranks that did not train to the end.

        Raises:
            LaunchError: The pool's server is gone.
            TraceError: The evidence of a rank cannot be read, or the shards of several ranks do not fit together.
        """
        ends = self.pool.finish(self.running)
        ranks: list[RankTrace] = []
        exits: dict[int, Exit] = {}
        hung: dict[int, Exit] = {}
        if self.store is None:
            ranks, exits, hung = gather(self.assignments, ends, self.settings.time_limit)
        else:
            take_so_far(self.folder, ends)
            for assignment, end in zip(self.assignments, ends, strict=True):
                file = Path(assignment.evidence)
                # A rank that was killed at the time limit may have trained to the end.
                hangs = not end.evidence and end.code is None and end.limit_reached and file.exists()
                if end.evidence or hangs:
                    ranks.append(read_rank(file))
                if not end.evidence:
                    exit = explain(end, assignment, self.settings.time_limit, hung=hangs)
                    (hung if hangs else exits)[end.rank] = exit
        trace = without_unfinished(Trace(tuple(ranks), exits, max(end.seconds for end in ends), hung=hung), self._due)
        for rank in trace.exits:
            # Evidence of an incomplete training must not be judged later.
            Path(self.assignments[0].as_rank(rank).evidence).unlink(missing_ok=True)
        return whole_tensors(trace, self.folder / FOLDER)

    @property
    def _due(self) -> int:
        assignment = self.assignments[0]
        workload = workload_of(assignment.cell)
        if assignment.stop_after_step is not None:
            return assignment.stop_after_step
        return workload.steps(assignment.cell.topology.devices) - (
            workload.interrupt_after or 0 if assignment.resume else 0
        )


def start(
    pool: Pool,
    cell: Cell,
    folder: Path,
    settings: Settings,
    checkpoint: CheckpointRequest | None = None,
    barrier_socket: Path | None = None,
    profile: Path | None = None,
) -> CellLaunch:
    """Begin to train ``cell``. Each rank writes one file of evidence to ``folder``.

    With a ``barrier_socket``, ranks are timed instead of recorded, and wait at that socket between rounds. With
    ``profile``, ranks also write the results of torch's profiler to that folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole_nodes = any(declared["launch"] == "node" for declared in _declared(pool, cell))
    if whole_nodes and barrier_socket:
        raise LaunchError(f"{cell.subject} starts its own ranks, so its speed cannot be measured")
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for left in folder.glob("*.safetensors") if whole_nodes else ():
        left.unlink()  # only this launch's evidence may be found there
    store = None if whole_nodes else new_store(pool.listens_on)
    meeting = {"MASTER_PORT": str(store.port)} if store else pool.meeting_point()
    number = pool.next_launch()
    comm = backend_of(cell.accelerator, shared=settings.oversubscribe) or "gloo"
    assignments = tuple(
        Assignment(
            launch=number,
            cell=cell,
            rank=rank,
            comm=comm,
            devices=_devices(cell, rank, settings.oversubscribe, whole_nodes),
            environment=_environment(cell, rank, whole_nodes)
            | pool.variables(cell, rank, settings.oversubscribe)
            | meeting,
            evidence=str(folder / f"rank-{rank}.safetensors"),
            log=str(folder / f"rank-{rank}.log"),
            checkpoint_dir=str(checkpoint.folder) if checkpoint else None,
            stop_after_step=checkpoint.stop_after_step if checkpoint else None,
            resume=checkpoint is not None and checkpoint.stop_after_step is None,
            store_above=settings.store_above,
            barrier_socket=str(barrier_socket) if barrier_socket else None,
            profile=str(profile) if profile else None,
            whole_node=whole_nodes,
        )
        for rank in range(0, cell.processes, cell.parallelism.processes_per_node(cell.topology) if whole_nodes else 1)
    )
    running = pool.begin(cell.subject, assignments, settings.time_limit)
    return CellLaunch(pool, running, assignments, store, folder, settings)


def launch(pool: Pool, cell: Cell, folder: Path, settings: Settings) -> Trace:
    return start(pool, cell, folder, settings).wait_for_trace()


def behavior_of(pool: Pool, cell: Cell) -> TrainingBehavior:
    return next((TrainingBehavior.of(declared["conduct"]) for declared in _declared(pool, cell)), TrainingBehavior())


def _declared(pool: Pool, cell: Cell) -> Iterator[dict[str, Any]]:
    for declared in pool.subjects:
        if declared["name"] == cell.subject and cell.backend in declared["backends"]:
            yield declared


def _devices(cell: Cell, rank: int, oversubscribe: bool, whole_node: bool) -> tuple[str, ...]:
    spread = cell.topology.gpus if whole_node else cell.parallelism.devices_per_process(cell.topology)
    if cell.accelerator == "cpu":
        return ("cpu",) * spread
    first = 0 if whole_node or spread > 1 else rank % cell.parallelism.processes_per_node(cell.topology)
    # With oversubscription, every node is on this machine and has all of its devices.
    present = count(cell.accelerator) if oversubscribe else first + spread
    return tuple(f"{cell.accelerator}:{(first + i) % present}" for i in range(spread))


def _environment(cell: Cell, rank: int, whole_node: bool) -> dict[str, str]:
    variables = torchrun_variables(rank, cell.processes, cell.parallelism.processes_per_node(cell.topology))
    if not whole_node:
        return variables
    of_node = {name: variables[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS")}
    return {**of_node, "NODE_RANK": variables["GROUP_RANK"]}
