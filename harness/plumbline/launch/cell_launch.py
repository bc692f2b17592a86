"""Launches a cell on a pool, and collects the trace."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.devices.counting import count
from plumbline.devices.types import backend_of
from plumbline.evidence.read import read_rank, whole_tensors
from plumbline.evidence.tensor_store import FOLDER
from plumbline.evidence.trace import STORE_ABOVE, Exit, RankTrace, Trace
from plumbline.evidence.trace_file import SO_FAR, write_rank
from plumbline.launch.launch_progress import ChildEnd, LaunchedRankEnd, RunningLaunch, first_to_fail
from plumbline.launch.pool import Pool
from plumbline.launch.stacks import calls_of, collective_of
from plumbline.launch.this_machine import new_store, torchrun_variables
from plumbline.own_workloads.load import workload_of
from plumbline.worker.assignment import Assignment, stack_beside


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


_PRINTED = 1500
_LONGEST_STACK = 12

_HINTS = {
    int(signal.SIGBUS): "a mapped file could not grow: check whether /dev/shm or the disk is full",
    int(signal.SIGXFSZ): "a file was larger than ulimit -f allows",
    int(signal.SIGXCPU): "it used more time than ulimit -t allows",
}


def explain(end: LaunchedRankEnd, assignment: Assignment, time_limit: float, *, hung: bool = False) -> Exit:
    """Return how a rank ended that wrote no evidence, or that wrote its evidence and then ``hung``."""
    calls = calls_of(_tail(Path(stack_beside(assignment.log)), 1 << 16))
    late = end.code is None
    if end.unwritten is not None:
        place = Path(assignment.evidence).parent
        remedy = f"free some space in {place}, or set TMPDIR to another folder"
        return Exit(Outcome.ERRORED, f"its trace cannot be written ({end.unwritten}): {remedy}", end.steps)
    if end.silent is not None:
        return Exit(Outcome.CRASHED, end.silent, end.steps, said=_tail(Path(assignment.log), _PRINTED))
    return Exit(
        Outcome.TIMED_OUT if late else Outcome.CRASHED,
        _late(end, time_limit, hung) if late else f"{_died(end)} before its trace was complete",
        step=end.steps,
        waits_in=collective_of(calls) if late and assignment.cell.processes > 1 else None,
        stack="\n".join(map(str, calls[:_LONGEST_STACK])),
        said=_tail(Path(assignment.log), _PRINTED),
    )


def _late(end: LaunchedRankEnd, time_limit: float, hung: bool) -> str:
    if not end.limit_reached:
        if hung:
            return "it was still running some seconds after all ranks had written their traces"
        return "killed while it waited for ranks that had ended"
    missed = "it had not ended" if hung else "not finished"
    return f"{missed} after {time_limit:.0f} s{' (it was stopped by SIGSTOP or a debugger)' if end.stopped else ''}"


def _died(end: LaunchedRankEnd) -> str:
    assert end.code is not None
    if end.code >= 0:
        return f"ended with exit code {end.code}"
    number = -end.code
    try:
        name = f" ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        name = ""
    starved = end.out_of_memory and number == signal.SIGKILL
    hint = "the machine, or its control group, was out of memory" if starved else _HINTS.get(number)
    return f"killed by signal {number}{name}{f' – {hint} –' if hint else ''}"


def _tail(file: Path, length: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - length))
            return stream.read().decode(errors="replace").strip()
    except OSError:
        return ""


def take_so_far(folder: Path, ends: Sequence[LaunchedRankEnd]) -> set[int]:
    """Keep the incomplete evidence of ranks that were killed at the time limit; remove other incomplete evidence.

    Returns:
        The ranks that have only incomplete evidence.
    """
    gone = {child.pid for end in ends for child in end.children if not child.late}
    late = set()
    for file in folder.glob(f"rank-*.safetensors.*{SO_FAR}"):
        rank, _, pid = file.name.removeprefix("rank-").removesuffix(SO_FAR).partition(".safetensors.")
        own = folder / f"rank-{rank}.safetensors"
        process = max((end for end in ends if end.rank <= int(rank)), key=lambda end: end.rank)
        was_ended = process.code is None and process.limit_reached and int(pid) not in gone
        if was_ended and not own.exists():
            file.replace(own)
            late.add(int(rank))
        else:
            file.unlink()
    return late


def without_unfinished(trace: Trace, due: int) -> Trace:
    """Return ``trace`` without the evidence of ranks that hung before they had attempted ``due`` optimizer steps.

    A rank that hung later hung in its teardown; its training is judged as if it had ended.
    """
    unfinished = {rank.rank for rank in trace.ranks if rank.rank in trace.hung and len(rank.steps) < due}
    if not unfinished and not trace.exits:
        return trace
    # If a rank is missing, nothing is judged, so every rank that hung is reported as an exit.
    return replace(
        trace,
        ranks=tuple(rank for rank in trace.ranks if rank.rank not in trace.hung),
        exits=dict(sorted({**trace.exits, **trace.hung}.items())),
        hung={},
    )


def gather(
    started: Sequence[Assignment], ends: Sequence[LaunchedRankEnd], time_limit: float
) -> tuple[list[RankTrace], dict[int, Exit], dict[int, Exit]]:
    """Return the traces of all ranks, how ranks without evidence ended, and how ranks hung after writing evidence.

    The fork server started only the first process of each node, whose descendants wrote their evidence to files.
    ``started`` are the first ranks of the nodes, and ``ends`` how their processes ended. If the subject's call raised
    an error that no rank raised, the error is assigned to the node's first rank. Afterwards, the folder looks as if
    Plumbline had started the ranks.
    """
    folder = Path(started[0].evidence).parent
    _sort_stacks(started, ends)
    late = take_so_far(folder, ends)
    for unfinished in folder.glob("rank-*.safetensors.*"):
        unfinished.unlink()  # the process was ended while it wrote this file
    found = {rank.rank: rank for rank in map(read_rank, folder.glob("rank-*.safetensors"))}
    exits: dict[int, Exit] = {}
    cut_off = {rank.rank for rank in found.values() if rank.has_lost_connection}
    origin = first_to_fail((child for end in ends for child in end.children), cut_off)
    for node, end in zip(started, ends, strict=True):
        first = _take_first_process(node, end)
        if end.silent or (first is None and not end.evidence and end.code is not None and origin is None):
            # The node's first process died while its ranks trained, so their evidence is incomplete.
            exits[node.rank] = explain(end, node, time_limit)
            found.pop(node.rank, None)
        elif first is not None and _is_first_rank(first, node, end, found):
            trace = found.get(node.rank, first)
            found[node.rank] = replace(trace, error=first.error, failed_at=first.failed_at, stack=first.stack)
            write_rank(node.evidence, found[node.rank])
    broken = origin is not None or bool(exits) or any(rank.error for rank in found.values())
    for node, end in zip(started, ends, strict=True):
        for rank in _ranks_of(node):
            if rank not in found and rank not in exits:
                exits[rank] = _missing(node.as_rank(rank), node, end, origin, broken, time_limit)
    for rank in exits:
        Path(started[0].as_rank(rank).log).touch()  # each rank has a log
    hung = _hung(started, ends, late, bool(exits), time_limit)
    return [found[rank] for rank in sorted(found)], exits, hung


def _ranks_of(node: Assignment) -> range:
    return range(node.rank, node.rank + node.processes_per_node)


def _hung(
    started: Sequence[Assignment],
    ends: Sequence[LaunchedRankEnd],
    late: Collection[int],
    incomplete: bool,
    time_limit: float,
) -> dict[int, Exit]:
    hung: dict[int, Exit] = {}
    for node, end in zip(started, ends, strict=True):
        for rank in _ranks_of(node):
            if rank in late:
                hung[rank] = explain(end, node.as_rank(rank), time_limit, hung=True)
        if end.code is None and not incomplete:
            hung.setdefault(node.rank, explain(end, node, time_limit, hung=True))
    return hung


def _take_first_process(node: Assignment, end: LaunchedRankEnd) -> RankTrace | None:
    """Read and remove the file that a node's first process writes if it is not a rank; return None if there is none.

    The error in the file is dropped if it was raised only because the launch was being ended.
    """
    file = Path(node.returned)
    if not file.is_file():
        return None
    trace = read_rank(file)
    file.unlink()
    return trace if end.raised else replace(trace, error=None, failed_at=None, stack="")


def _is_first_rank(first: RankTrace, node: Assignment, end: LaunchedRankEnd, found: Mapping[int, RankTrace]) -> bool:
    if first.error is not None and not any(child.is_bad for child in end.children):
        return True
    return node.rank not in found and not any(child.rank == node.rank for child in end.children if not child.idle)


def _missing(
    own: Assignment, node: Assignment, end: LaunchedRankEnd, origin: ChildEnd | None, broken: bool, time_limit: float
) -> Exit:
    child = next((child for child in reversed(end.children) if child.rank == own.rank and not child.idle), None)
    late = LaunchedRankEnd(own.rank, evidence=False, code=None, seconds=end.seconds, limit_reached=end.limit_reached)
    if child is not None:
        late = replace(late, steps=child.steps, out_of_memory=child.out_of_memory, unwritten=child.unwritten)
        if child is origin:
            exit = explain(replace(late, code=child.code or 0), own, time_limit)
            if child.code is None and child.unwritten is None:
                exit = replace(exit, message="ended with an unknown exit code before its trace was complete")
        else:
            exit = explain(replace(late, limit_reached=child.late and end.limit_reached), own, time_limit)
    elif broken or end.code is None:
        exit = replace(
            explain(late, own, time_limit), message="no process started as this rank before the launch ended"
        )
    else:
        exit = Exit(Outcome.CRASHED, "the subject started no process with this rank")
    return exit if exit.said else replace(exit, said=explain(late, node, time_limit).said)


def _sort_stacks(started: Sequence[Assignment], ends: Sequence[LaunchedRankEnd]) -> None:
    for node, end in zip(started, ends, strict=True):
        for child in end.children:
            stack = Path(node.log).with_name(f"pid-{child.pid}.stack")
            if stack.is_file() and stack.stat().st_size and child.rank is not None:
                stack.replace(stack_beside(node.as_rank(child.rank).log))
    for stack in Path(started[0].log).parent.glob("pid-*.stack"):
        stack.unlink()
