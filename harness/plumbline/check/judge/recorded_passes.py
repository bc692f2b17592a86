"""Reads what observers noted about backward passes: each pass once, whichever optimizers it concerned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.check.evidence.training import BackwardPass, Facts, RecordedRank, RecordedTraining


def passes_of(rank: RecordedRank) -> list[BackwardPass]:
    """Return the backward passes of a rank, in their order."""
    found = {one.number: one for step in rank.steps for one in (*step.other_passes, *step.passes)}
    return [found[number] for number in sorted(found)]


def forwards_of(rank: RecordedRank, observer: str) -> list[Facts]:
    """Return what an observer noted about the forwards of a rank, in their order."""
    return [made for one in passes_of(rank) for made in one.facts.get(observer, {}).get("forwards", ())]


def aligned_forwards(training: RecordedTraining, observer: str) -> Iterator[tuple[int, Sequence[Facts]]]:
    """Yield the number of each forward, and what an observer noted about it on every rank.

    Ends where a rank has no more, or where ranks call different modules.
    """
    for place, forwards in enumerate(zip(*(forwards_of(rank, observer) for rank in training.ranks), strict=False)):
        if len({forward.get("module") for forward in forwards}) > 1:
            return
        yield place, forwards


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return ``all ranks``, ``ranks 0 and 1`` or ``ranks 0, 2 and 4``."""
    if len(ranks) == world_size:
        return "all ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
