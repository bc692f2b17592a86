"""Ranks that hung: which of them had trained to the end, and which hung in the middle of it."""

from __future__ import annotations

from dataclasses import replace

from harness.core.trace import Trace


def without_unfinished(trace: Trace, due: int) -> Trace:
    """Return ``trace`` without the evidence of ranks that hung before they had attempted ``due`` optimizer steps.

    A rank that hung afterwards hung in its teardown: what it trained is judged, as if it had ended.
    """
    unfinished = {rank.rank for rank in trace.ranks if rank.rank in trace.hung and len(rank.steps) < due}
    if not unfinished and not trace.exits:
        return trace
    # Where one rank is missing the others are not judged either: then all that hung are told of alike.
    return replace(
        trace,
        ranks=tuple(rank for rank in trace.ranks if rank.rank not in trace.hung),
        exits=dict(sorted({**trace.exits, **trace.hung}.items())),
        hung={},
    )
