"""Launches of subjects that start their ranks by themselves: what became of ranks that are nobody's but the subject's.

The fork server knows a node's first process only; of those below it hears on their lines. What they left lies in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.core.outcome import Outcome
from harness.evidence.rank_file import write_rank
from harness.evidence.read import read_rank
from harness.evidence.trace import Exit, RankTrace
from harness.launch.child_processes import ChildEnd
from harness.launch.exit_reason import explain
from harness.launch.hung_ranks import take_so_far
from harness.launch.pool import RankEnd
from harness.worker.assignment import Assignment, stack_beside


def gather(
    started: Sequence[Assignment], ends: Sequence[RankEnd], time_limit: float
) -> tuple[list[RankTrace], dict[int, Exit], dict[int, Exit]]:
    """Return what the ranks of all nodes left, what became of those that left nothing, and of those that hung then.

    ``started`` are the first ranks of the nodes, and ``ends`` how their processes ended. The folder is left as ranks of
    the harness' own would have left it: what the subject's call raised, and no rank did, is the first one's error.

    Raises:
        TraceError: evidence cannot be read.
    """
    _sort_stacks(started, ends)
    late = take_so_far(Path(started[0].evidence).parent, ends)
    for begun in Path(started[0].evidence).parent.glob("rank-*.safetensors.*"):
        begun.unlink()  # by somebody who was ended before it was whole
    found = {rank.rank: rank for rank in map(read_rank, Path(started[0].evidence).parent.glob("rank-*.safetensors"))}
    exits: dict[int, Exit] = {}
    origin = _first_to_fail(ends)
    for node, end in zip(started, ends, strict=True):
        said = _returned(node, end)
        if end.silent or (said is None and not end.evidence and end.code is not None and origin is None):
            # It died in the middle of everything: what a rank left until then is not evidence of a whole training.
            exits[node.rank] = explain(end, node, time_limit)
            found.pop(node.rank, None)
        elif said is not None and _is_first_rank(said, node, end, found):
            found[node.rank] = _with_error_of(said, found.get(node.rank, said))
            write_rank(node.evidence, found[node.rank])
    broken = origin is not None or bool(exits) or any(rank.error for rank in found.values())
    for node, end in zip(started, ends, strict=True):
        for rank in range(node.rank, node.rank + node.processes_per_node):
            if rank not in found and rank not in exits:
                exits[rank] = _missing(node.as_rank(rank), node, end, origin, broken, time_limit)
    hung: dict[int, Exit] = {}
    for node, end in zip(started, ends, strict=True):
        ranks = range(node.rank, node.rank + node.processes_per_node)
        hung |= {rank: explain(end, node.as_rank(rank), time_limit, hung=True) for rank in late & {*ranks}}
        if end.code is None and not exits:  # its first process, when all of its ranks had left their evidence
            hung.setdefault(node.rank, explain(end, node, time_limit, hung=True))
    for rank in exits:
        Path(started[0].as_rank(rank).log).touch()  # a rank leaves a log in any case
    return [found[rank] for rank in sorted(found)], exits, hung


def _first_to_fail(ends: Sequence[RankEnd]) -> ChildEnd | None:
    """Return the child that ended badly before any other: where one is gone, the others are ended for it."""
    bad = (child for end in ends for child in end.children if child.is_bad)
    return min(bad, key=lambda child: child.at, default=None)


def _returned(node: Assignment, end: RankEnd) -> RankTrace | None:
    """Take what a node's first process left where it was no rank; the file goes.

    What it raises when the launch is being ended is no news.
    """
    file = Path(node.returned)
    if not file.is_file():
        return None
    said = read_rank(file)
    file.unlink()
    return said if end.raised else replace(said, error=None, failed_at=None, stack="")


def _is_first_rank(said: RankTrace, node: Assignment, end: RankEnd, found: Mapping[int, RankTrace]) -> bool:
    """Say whether what a node's first process left has to stand for the node's first rank."""
    if said.error is not None and not any(child.is_bad for child in end.children):
        return True
    return node.rank not in found and not any(child.rank == node.rank for child in end.children if not child.idle)


def _with_error_of(said: RankTrace, rank: RankTrace) -> RankTrace:
    return replace(rank, error=said.error, failed_at=said.failed_at, stack=said.stack)


def _missing(
    own: Assignment, node: Assignment, end: RankEnd, origin: ChildEnd | None, broken: bool, time_limit: float
) -> Exit:
    """Return what became of one rank of ``node``, whose first process ended as ``end`` says."""
    child = next((child for child in reversed(end.children) if child.rank == own.rank and not child.idle), None)
    late = RankEnd(own.rank, evidence=False, code=None, seconds=end.seconds, limit_reached=end.limit_reached)
    if child is not None:
        late = replace(late, steps=child.steps, out_of_memory=child.out_of_memory, unwritten=child.unwritten)
        if child is origin:
            exit = explain(replace(late, code=child.code or 0), own, time_limit)
            if child.code is None and child.unwritten is None:
                exit = replace(exit, message="ended, nobody saw how, before its evidence was complete")
        else:
            exit = explain(replace(late, limit_reached=child.late and end.limit_reached), own, time_limit)
    elif broken or end.code is None:
        exit = replace(explain(late, own, time_limit), message="no process was this rank until the launch was ended")
    else:
        exit = Exit(Outcome.CRASHED, "no process that the subject started was this rank")
    return exit if exit.said else replace(exit, said=explain(late, node, time_limit).said)


def _sort_stacks(started: Sequence[Assignment], ends: Sequence[RankEnd]) -> None:
    """Put the stacks of processes that were ended where those of their ranks belong; the others go."""
    for node, end in zip(started, ends, strict=True):
        for child in end.children:
            stack = Path(node.log).with_name(f"pid-{child.pid}.stack")
            if stack.is_file() and stack.stat().st_size and child.rank is not None:
                stack.replace(stack_beside(node.as_rank(child.rank).log))
    for stack in Path(started[0].log).parent.glob("pid-*.stack"):
        stack.unlink()
