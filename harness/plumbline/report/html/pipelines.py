"""The timeline of a pipeline's step on a page: a row a rank, boxes labelled with micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from plumbline.drawing.timeline import Box, timeline
from plumbline.report.tables.measured import MeasuredCell, has_several_subjects
from plumbline.report.text import counted, in_words
from plumbline.results.records import TimelineChunk

MOST_TIMELINES: Final = 12


@dataclass(frozen=True)
class PipelineTimeline:
    """One configuration's picture; ``sentence`` says what is in it for those who do not see it."""

    label: str
    sentence: str
    picture: Markup


def pipeline_timelines(cells: Iterable[MeasuredCell]) -> Iterator[PipelineTimeline]:
    drawn = [cell for cell in cells if "pipeline_bubble" in cell.figures and cell.figures["pipeline_bubble"].timeline]
    several = has_several_subjects(drawn)
    for cell in drawn[:MOST_TIMELINES]:
        figure = cell.figures["pipeline_bubble"]
        label = cell.configuration(several_subjects=several)
        sentence = _sentence(figure.timeline)
        if figure.value is not None:
            sentence += f" The bubble is {in_words(figure.value, figure.unit)} of the ranks’ time, over all launches."
        yield PipelineTimeline(label, sentence, Markup(_drawn(f"A step of the pipeline {label}", figure.timeline)))


def _drawn(title: str, chunks: tuple[TimelineChunk, ...]) -> str:
    ranks = sorted({chunk.rank for chunk in chunks})
    stages = {rank: sorted({chunk.stage for chunk in chunks if chunk.rank == rank}) for rank in ranks}
    several = _have_several({(chunk.rank, chunk.stage) for chunk in chunks})
    boxes = [
        Box(
            ranks.index(chunk.rank),
            chunk.kind,
            f"{chunk.stage}:{chunk.micro_batch}" if several else str(chunk.micro_batch),
            chunk.begin,
            chunk.end,
            f"{chunk.kind} of micro-batch {chunk.micro_batch}, stage {chunk.stage}, rank {chunk.rank}: "
            f"{in_words(chunk.end - chunk.begin, 's')} from {in_words(chunk.begin, 's')} on",
        )
        for chunk in chunks
    ]
    return timeline(title, [_row(rank, own) for rank, own in stages.items()], boxes)


def _have_several(places: Set[tuple[int, int]]) -> bool:
    return len(places) > len({rank for rank, _ in places})


def _row(rank: int, stages: list[int]) -> str:
    return f"rank {rank}, stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


def _sentence(chunks: tuple[TimelineChunk, ...]) -> str:
    busy: dict[int, float] = {}
    for chunk in chunks:
        busy[chunk.rank] = busy.get(chunk.rank, 0.0) + chunk.end - chunk.begin
    span = max(chunk.end for chunk in chunks)
    shares = ", ".join(
        f"rank {rank} {in_words(seconds / (span or 1.0), 'share')}" for rank, seconds in sorted(busy.items())
    )
    stages = len({chunk.stage for chunk in chunks})
    labels = (
        " Boxes are labelled stage:micro-batch." if _have_several({(one.rank, one.stage) for one in chunks}) else ""
    )
    number = counted(1 + max(chunk.micro_batch for chunk in chunks), "micro-batch", "micro-batches")
    return f"{counted(stages, 'stage')}, {number}, {in_words(span, 's')}; computing: {shares}.{labels}"
