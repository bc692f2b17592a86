"""Ranks that hung, during their training or after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plumbline.evidence.rank_file import SO_FAR
from plumbline.evidence.trace import Trace
from plumbline.launch.launch_progress import LaunchedRankEnd


def take_so_far(folder: Path, ends: Sequence[LaunchedRankEnd]) -> set[int]:
    """Keep the incomplete evidence of ranks that were killed at the time limit; remove that of other ranks.

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
    # If a rank is missing, nothing is judged, and all ranks that hung are reported in the same way.
    return replace(
        trace,
        ranks=tuple(rank for rank in trace.ranks if rank.rank not in trace.hung),
        exits=dict(sorted({**trace.exits, **trace.hung}.items())),
        hung={},
    )
