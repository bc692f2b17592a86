"""Finds forwards that ran again and updated running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from plumbline.judge.buffer_replay import buffer_error, buffers_after, own_shares
from plumbline.judge.oracle.layout import Share
from plumbline.judge.oracle.noise import limit
from plumbline.judge.trace_analysis import TraceAnalysis

AT_ONCE = "each forward updates the statistics twice: check whether it runs again, for example to find shapes"
IN_THE_BACKWARD = "each forward updates the statistics twice: check whether activations are recomputed in training mode"
FIRST_OF_A_BATCH = "a batch's first forward updates the statistics twice: check whether it runs again, to find shapes"


def updated_again(analysis: TraceAnalysis) -> str | None:
    """Return in words which forwards updated the buffers of every step again; None if that explains nothing.

    Ranks may run forwards in different orders, so each buffer is explained separately.
    """
    every = [list(_ways(analysis, index)) for index in range(len(analysis.steps) - 1)]
    if not every:
        return None
    fitting: dict[str, str] = {}
    for place, (words, *_) in enumerate(every[0]):
        fits = [_fitting(analysis, index, *ways[place][1:]) for index, ways in enumerate(every)]
        for name in set.intersection(*fits):
            fitting.setdefault(name, words)
    unexplained = analysis.steps[1].ranks[0].buffers.keys() & analysis.oracle.buffers.keys() - fitting.keys()
    # A stage that goes back at once leaves no trace of when.
    return None if unexplained else max(fitting.values(), key=(AT_ONCE, FIRST_OF_A_BATCH, IN_THE_BACKWARD).index)


def _ways(analysis: TraceAnalysis, index: int) -> Iterator[tuple[str, list[Share], list[Share]]]:
    """Yield words, a step's forwards with some repeated, and the next step's forwards before its first.

    A forward is repeated at once, or in its backward, after the forwards that a schedule starts with. The recorded
    buffers of a step include what ran before its first recorded forward.
    """
    now, then = (own_shares(step.ranks[0]) for step in analysis.steps[index : index + 2])
    size = analysis.cell.contract.micro_batches
    batches = [now[first : first + size] for first in range(0, len(now), size)]
    for words, order in (
        (AT_ONCE, [share for one in now for share in (one, one)]),
        (FIRST_OF_A_BATCH, [share for batch in batches for share in (*batch[:1], *batch)]),
    ):
        yield words, order, []
        yield words, order[1:], then[:1]
    for early in range(1, size + 1):
        yield IN_THE_BACKWARD, [share for batch in batches for share in _recomputed(batch, early)], []


def _recomputed(batch: Sequence[Share], early: int) -> list[Share]:
    order = list(batch[:early])
    for place, share in enumerate(batch):
        order += [*batch[place + early : place + early + 1], share]
    return order


def _fitting(analysis: TraceAnalysis, index: int, shares: list[Share], ahead: list[Share]) -> set[str]:
    """Return the buffers that these forwards of a step and of the next one explain."""
    before, after = (step.ranks[0] for step in analysis.steps[index : index + 2])
    size = analysis.cell.contract.micro_batches
    exact, rough = (
        buffers_after(oracle, replace(after, buffers=buffers_after(oracle, before, shares, size)), ahead, size)
        for oracle in (analysis.oracle, analysis.cell_oracle)
    )
    found = after.buffers
    return {n for n in found if n in exact and buffer_error(found[n], exact[n], rough[n], analysis) <= limit()}
