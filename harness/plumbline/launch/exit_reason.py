"""Explains how ranks died or hung (exit code or signal, stack, last output), and decides which evidence is kept."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plumbline.core.outcome import Outcome
from plumbline.evidence.rank_file import SO_FAR
from plumbline.evidence.trace import Exit, Trace
from plumbline.launch.launch_progress import LaunchedRankEnd
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
