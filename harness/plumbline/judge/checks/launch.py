"""Did every rank start, in a world of the right size, leave its trace, and end?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Exit, Trace
from plumbline.judge.causes.stage_pattern import ranks_in_words

_LONGEST_LINE = 300
_STACKS = 4
"""All stacks are shown for up to this many ranks; for more, only the named rank's."""

AFTER_TRAINING = ("validation", "metrics")
"""Checks that also judge the time after the last step, which a hung rank may not have reached."""


def launch(trace: Trace, cell: Cell) -> Finding | None:
    """Return what is wrong with the launch, or None if the trace is complete.

    A rank that crashed explains the ranks that waited for it, so crashes come first. A rank that raised is more often
    the origin than a rank that was ended because it waited, so time-outs come last.
    """
    ends: dict[Outcome, list[int]] = {
        outcome: [rank for rank, exit in trace.exits.items() if exit.outcome is outcome] for outcome in Outcome
    }
    raised = [(rank.failed_at or 0.0, rank.rank) for rank in trace.ranks if rank.error]
    if crashed := ends[Outcome.CRASHED]:
        return _ended_badly(Outcome.CRASHED, min(crashed), trace)
    if lost := ends[Outcome.ERRORED]:
        return _ended_badly(Outcome.ERRORED, min(lost), trace)
    if raised:
        return _ended_badly(Outcome.ERRORED, min(raised)[1], trace)
    if late := ends[Outcome.TIMED_OUT]:
        return _ended_badly(Outcome.TIMED_OUT, min(late, key=lambda rank: (*_progress(trace.exits[rank]), rank)), trace)
    present = [rank.rank for rank in trace.ranks]
    if present != list(range(cell.processes)):
        found = ranks_in_words(present) if present else "no rank"
        message = f"{found} left a trace, but the cell has {counted(cell.processes, 'rank')}"
        return Finding("launch", Outcome.ERRORED, message)
    alone = [rank for rank in trace.ranks if rank.world_size != cell.processes]
    if alone:
        return Finding(
            "launch",
            Outcome.FAILED,
            f"rank {alone[0].rank} trained in a world of {alone[0].world_size} instead of {cell.processes}",
            family="launch",
            rank=alone[0].rank,
        )
    if elsewhere := trace.elsewhere(cell.accelerator):
        found = f"trained on {' and '.join(elsewhere[0].devices)} instead of {cell.accelerator}"
        return Finding(
            "launch",
            Outcome.FAILED,
            f"rank {elsewhere[0].rank} {found}",
            family="launch",
            rank=elsewhere[0].rank,
        )
    return None


def details(finding: Finding, trace: Trace) -> str:
    """Return the details of a launch that broke: how other ranks ended, their stacks, and the last output."""
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
            lines.append(f"rank {rank} has no stack: it did not respond to SIGUSR1")
    said = trace.exits[finding.rank].said if finding.rank in trace.exits else ""
    return "\n".join([*lines, *([f"last output of rank {finding.rank}:", said] if said else [])])


def with_hung_ranks(findings: Iterable[Finding], trace: Trace) -> list[Finding]:
    """Return the findings of a training in which some ranks hung after the last step, with a note that says so.

    The trace of the training is complete, and its findings hold, except failures of the checks that also judge the time
    after the last step.
    """
    rank, exit = min(trace.hung.items())
    version = next((f" (torch {one.torch})" for one in trace.ranks if one.torch), "")
    note = (
        f"The training was complete. Afterwards rank {rank} hung{_where(exit)}: {exit.message}"
        f"{version}. This does not affect what it computed."
    )
    judged = [
        replace(one, outcome=Outcome.TIMED_OUT, message=f"rank {rank} hung after the last step: {one.message}")
        if one.check in AFTER_TRAINING and one.outcome is Outcome.FAILED
        else one
        for one in findings
    ]
    return [Finding("launch", Outcome.PASSED, note, rank=rank), *judged]


def _progress(exit: Exit) -> tuple[bool, int]:
    """Sort key: a rank that waits in no collective first, then the one with the fewest steps."""
    return exit.waits_in is not None, exit.step or 0


def _ended_badly(outcome: Outcome, rank: int, trace: Trace) -> Finding:
    others = len(_ends(trace)) - 1
    suffix = f" ({counted(others, 'other rank')} failed as well)" if others > 0 else ""
    steps = {one.rank: len(one.steps) for one in trace.ranks}
    step = trace.exits[rank].step if rank in trace.exits else steps[rank]
    return Finding("launch", outcome, f"rank {rank}: {_ends(trace)[rank]}{suffix}", step=step, rank=rank)


def _ends(trace: Trace) -> dict[int, str]:
    ends = {rank.rank: f"{_beginning(rank.error)}{_at(len(rank.steps))}" for rank in trace.ranks if rank.error}
    for rank, exit in trace.exits.items():
        where = _where(exit)
        ends[rank] = f"{exit.message}{_at(exit.step)}{',' if where else ''}{where}"
    return dict(sorted(ends.items()))


def _where(exit: Exit) -> str:
    """Return the collective that a rank waited in, else the innermost line of its stack."""
    if exit.waits_in:
        return f" waiting in {exit.waits_in}"
    return f" in {exit.stack.splitlines()[0]}" if exit.stack else ""


def _at(step: int | None) -> str:
    return "" if step is None else f", at step {step}"


def _beginning(error: str) -> str:
    """Return the first line of an error, shortened: torch's dispatcher errors have a hundred lines."""
    first, _, rest = error.strip().partition("\n")
    first = first if len(first) <= _LONGEST_LINE else first[:_LONGEST_LINE] + " …"
    return f"{first} …" if rest.strip() else first


def _of_several(ends: dict[int, str]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for rank, end in ends.items():
        alike.setdefault(end, []).append(rank)
    return [f"{ranks_in_words(ranks)}: {end}" for end, ranks in alike.items()]
