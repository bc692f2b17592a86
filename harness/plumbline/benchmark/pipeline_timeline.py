"""The bubble of a pipeline and the timeline of one of its steps, from the chunks that its ranks computed.

The bubble is the part of all stages' time in which they wait: 1 - busy / (ranks × span), from the step's first chunk to
the end of its last one. Work beside the chunks (the optimizer, sums of tied weights) lies outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Final

from plumbline.benchmark.timed_launch import LaunchTimings
from plumbline.evidence.timing import FORWARD, Chunk
from plumbline.results.records import TimelineChunk
from plumbline.worker.timing.profiler import union

Step = Mapping[int, Sequence[Chunk]]
"""The chunks of one step by rank, in the order in which they ran."""

MOST_CHUNKS: Final = 1000
"""A timeline of more chunks is neither kept nor drawn: nobody could read it."""

_NS = 1e9


def bubble(timed: LaunchTimings, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median bubble of a launch's steps, the mean over its pipelines; None where chunks are missing.

    ``groups`` are the ranks of each pipeline.
    """
    steps = _steps(timed)
    return median(fmean(_bubble_of(step, group) for group in groups) for step in steps) if steps else None


def timeline(timed: LaunchTimings, groups: Sequence[Sequence[int]]) -> tuple[TimelineChunk, ...]:
    """Return the chunks of the last step that was followed, nothing where there are none or too many to be read.

    Times are seconds from the beginning of the step. Stages are counted in the order of the model: in that order the
    first micro-batch reaches them.
    """
    steps = _steps(timed)
    if not steps or sum(map(len, steps[-1].values())) > MOST_CHUNKS:
        return ()
    step = steps[-1]
    begun = min(chunk.begun for chunks in step.values() for chunk in chunks)
    numbers = {key: number for group in groups for number, key in enumerate(_stages(step, group))}
    return tuple(
        TimelineChunk(
            rank=rank,
            stage=numbers[rank, chunk.stage],
            micro_batch=chunk.micro_batch,
            kind=chunk.kind,
            begin=round(chunk.begun - begun, 7),
            end=round(chunk.ended - begun, 7),
        )
        for rank, chunks in step.items()
        for chunk in chunks
        if (rank, chunk.stage) in numbers
    )


def _steps(timed: LaunchTimings) -> list[Step]:
    steps = zip(*(rank.pipeline for rank in timed.ranks), strict=True)
    return [{rank.rank: own for rank, own in zip(timed.ranks, step, strict=True)} for step in steps if all(step)]


def _bubble_of(step: Step, ranks: Sequence[int]) -> float:
    spans = {rank: sorted((round(one.begun * _NS), round(one.ended * _NS)) for one in step[rank]) for rank in ranks}
    begun = min(begin for own in spans.values() for begin, _ in own)
    ended = max(end for own in spans.values() for _, end in own)
    busy = sum(map(union, spans.values()))
    return 1 - busy / (len(ranks) * (ended - begun))


def _stages(step: Step, ranks: Sequence[int]) -> list[tuple[int, int]]:
    firsts = {
        (rank, chunk.stage): chunk.begun
        for rank in ranks
        for chunk in step[rank]
        if chunk.kind == FORWARD and chunk.micro_batch == 0
    }
    return sorted(firsts, key=firsts.__getitem__)
