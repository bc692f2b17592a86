"""Collects the traces of ranks that a subject starts itself, or how these ranks ended.

The fork server starts only the first process of each node. Its descendants connect to the server, and write their
evidence to files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plumbline.core.outcome import Outcome
from plumbline.evidence.rank_file import write_rank
from plumbline.evidence.read import read_rank
from plumbline.evidence.trace import Exit, RankTrace
from plumbline.launch.exit_reason import explain, take_so_far
from plumbline.launch.launch_progress import ChildEnd, LaunchedRankEnd, first_to_fail
from plumbline.worker.assignment import Assignment, stack_beside


def gather(
    started: Sequence[Assignment], ends: Sequence[LaunchedRankEnd], time_limit: float
) -> tuple[list[RankTrace], dict[int, Exit], dict[int, Exit]]:
    """Return the traces of all ranks, how ranks without evidence ended, and how ranks hung after writing evidence.

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
