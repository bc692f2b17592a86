"""Explains how ranks died or hung (exit code or signal, stack, last output), and decides which evidence is kept."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plumbline.core.outcome import Outcome
from plumbline.evidence.rank_file import SO_FAR, write_rank
from plumbline.evidence.read import read_rank
from plumbline.evidence.trace import Exit, RankTrace, Trace
from plumbline.launch.launch_progress import ChildEnd, LaunchedRankEnd, first_to_fail
from plumbline.launch.stacks import calls_of, collective_of
from plumbline.worker.assignment import Assignment, stack_beside

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
