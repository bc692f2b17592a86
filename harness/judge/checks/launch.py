"""Did every rank come to life, in the right world, and leave its evidence?"""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Exit, Trace

_LONGEST_LINE = 300
_STACKS = 4
"""Of so many ranks the calls are shown; of more, those of the one that is named."""


def launch(trace: Trace, cell: Cell) -> Finding | None:
    """Return what is wrong with the launch, or None where the evidence is whole.

    A rank that died explains those that waited for it, so deaths come before time-outs and time-outs before
    exceptions that other ranks got from a peer that went away.
    """
    # A rank that raised is the origin more often than one that was then killed for waiting.
    errors = [(rank.failed_at or 0.0, rank.rank) for rank in trace.ranks if rank.error]
    crashes = [rank for rank, exit in trace.exits.items() if exit.outcome is Outcome.CRASHED]
    lost = [rank for rank, exit in trace.exits.items() if exit.outcome is Outcome.ERRORED]
    stuck = [(_patience(exit), rank) for rank, exit in trace.exits.items() if exit.outcome is Outcome.TIMED_OUT]
    if crashes:
        return _finding(Outcome.CRASHED, min(crashes), trace)
    if lost:
        return _finding(Outcome.ERRORED, min(lost), trace)
    if errors:
        return _finding(Outcome.ERRORED, min(errors)[1], trace)
    if stuck:
        return _finding(Outcome.TIMED_OUT, min(stuck)[1], trace)
    present = [rank.rank for rank in trace.ranks]
    if present != list(range(cell.processes)):
        return Finding(
            "launch", Outcome.ERRORED, f"evidence of ranks {present} is here, not of 0 to {cell.processes - 1}"
        )
    alone = [rank for rank in trace.ranks if rank.world_size != cell.processes]
    if alone:
        return Finding(
            "launch",
            Outcome.FAILED,
            f"rank {alone[0].rank} trained in a world of {alone[0].world_size}, not of {cell.processes}",
            family="launch",
            rank=alone[0].rank,
        )
    return None


def details(finding: Finding, trace: Trace) -> str:
    """Return what else is known of a launch that broke: how other ranks ended, calls, and what was printed last."""
    ends = _ends(trace)
    if finding.rank not in ends:
        return ""
    lines = _of_several({rank: end for rank, end in ends.items() if rank != finding.rank})
    stacks = {rank.rank: rank.stack for rank in trace.ranks} | {rank: exit.stack for rank, exit in trace.exits.items()}
    shown = sorted(trace.exits) if finding.outcome is Outcome.TIMED_OUT and len(trace.exits) <= _STACKS else []
    for rank in shown or [finding.rank]:
        if stacks[rank]:
            lines += [f"rank {rank} was at", *(f"  {call}" for call in stacks[rank].splitlines())]
        elif finding.outcome is Outcome.TIMED_OUT:
            lines.append(f"rank {rank} left no stack: it did not answer SIGUSR1")
    said = trace.exits[finding.rank].said if finding.rank in trace.exits else ""
    return "\n".join([*lines, *([f"rank {finding.rank} said last", said] if said else [])])


def _patience(exit: Exit) -> tuple[bool, int]:
    """Sort key: who waits for nobody comes before those who wait in a collective, then who has come least far."""
    return exit.waits_in is not None, exit.step or 0


def _finding(outcome: Outcome, rank: int, trace: Trace) -> Finding:
    others = len(_ends(trace)) - 1
    suffix = f" ({others} other rank{'s' * (others > 1)} ended badly after it)" if others > 0 else ""
    steps = {one.rank: len(one.steps) for one in trace.ranks}
    step = trace.exits[rank].step if rank in trace.exits else steps[rank]
    return Finding("launch", outcome, f"rank {rank}: {_ends(trace)[rank]}{suffix}", step=step, rank=rank)


def _ends(trace: Trace) -> dict[int, str]:
    """Return how each rank ended that ended badly, in a line."""
    ends = {rank.rank: f"{_beginning(rank.error)}{_at(len(rank.steps))}" for rank in trace.ranks if rank.error}
    for rank, exit in trace.exits.items():
        waits = f", waiting in {exit.waits_in}" if exit.waits_in else ""
        place = f", in {exit.stack.splitlines()[0]}" if exit.stack and not waits else ""
        ends[rank] = f"{exit.message}{_at(exit.step)}{waits}{place}"
    return dict(sorted(ends.items()))


def _at(step: int | None) -> str:
    return "" if step is None else f", at step {step}"


def _beginning(error: str) -> str:
    """Return the first line of what a rank raised, which says what; torch's dispatcher goes on for a hundred."""
    first, _, rest = error.strip().partition("\n")
    first = first if len(first) <= _LONGEST_LINE else first[:_LONGEST_LINE] + " …"
    return f"{first} …" if rest.strip() else first


def _of_several(ends: dict[int, str]) -> list[str]:
    """Return a line for each way to end: ranks that ended alike share one."""
    alike: dict[str, list[int]] = {}
    for rank, end in ends.items():
        alike.setdefault(end, []).append(rank)
    return [f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}: {end}" for end, ranks in alike.items()]


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
