"""Did every rank come to life, in the right world, and leave its evidence?"""

from __future__ import annotations

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.trace import Trace


def launch(trace: Trace, cell: Cell) -> Finding | None:
    """Return what is wrong with the launch, or None where the evidence is whole.

    A rank that died explains those that waited for it, so deaths come before time-outs and time-outs before
    exceptions that other ranks got from a peer that went away.
    """
    # A rank that raised is the origin more often than one that was then killed for waiting.
    errors = [(rank.failed_at or 0.0, rank.rank, rank.error) for rank in trace.ranks if rank.error]
    crashes = {rank: exit for rank, exit in trace.exits.items() if exit.outcome is Outcome.CRASHED}
    stuck = {rank: exit for rank, exit in trace.exits.items() if exit.outcome is Outcome.TIMED_OUT}
    if crashes:
        rank, exit = min(crashes.items())
        return _finding(Outcome.CRASHED, rank, exit.message, trace)
    if errors:
        _, rank, error = min(errors)
        return _finding(Outcome.ERRORED, rank, _beginning(error), trace)
    if stuck:
        rank, exit = min(stuck.items())
        return _finding(Outcome.TIMED_OUT, rank, exit.message, trace)
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


def _beginning(error: str) -> str:
    """Return the first line of what a rank raised, which says what; torch's dispatcher goes on for a hundred."""
    first, _, rest = error.strip().partition("\n")
    return f"{first} …" if rest.strip() else first


def _finding(outcome: Outcome, rank: int, message: str, trace: Trace) -> Finding:
    others = sum(1 for other in trace.ranks if other.error) + len(trace.exits) - 1
    suffix = f" ({others} other ranks ended badly after it)" if others > 0 else ""
    return Finding("launch", outcome, f"rank {rank}: {message}{suffix}", rank=rank)
