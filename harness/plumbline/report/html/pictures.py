"""Pictures of what went wrong, and timelines of pipelines.

Sizes and positions are in CSS pixels; the templates draw them as SVG. Each picture writes its values as text and marks
what is wrong with a frame, so that it can be read without colours, and has a sentence for readers who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from plumbline.core.numbers import compact, counted, x_noise
from plumbline.drawing import Box, timeline
from plumbline.report.tables.measured import MeasuredCell, has_several_subjects
from plumbline.report.text import in_words, printable, shortened
from plumbline.results.records import RankShares, Result, TimelineChunk

SQUARE_WIDTH: Final = 46
SQUARE_HEIGHT: Final = 20
HEAD: Final = 18
LETTER: Final = 6.6
LONGEST_NAME: Final = 30
DEGREES: Final = 4  # shades of wrong: each is a thousand times worse than the one before
NODE_DISTANCE: Final = 44
RECEIVED_AT: Final = 146
BOLD_LETTER: Final = 7.4
LEAST_WIDTH: Final = 336


@dataclass(frozen=True)
class Square:
    """One error: its position, its text, and its ``degree``: 0 within the limit, up to ``DEGREES``; -1 if unknown."""

    x: float
    y: float
    text: str
    degree: int


@dataclass(frozen=True)
class HeatMap:
    """Errors over steps (columns) and parameters (rows). ``names`` and ``steps`` are pairs of position and text."""

    title: str
    sentence: str
    width: float
    height: float
    names: tuple[tuple[float, str], ...]
    steps: tuple[tuple[float, str], ...]
    squares: tuple[Square, ...]


@dataclass(frozen=True)
class Link:
    """A line from a rank's own gradient to the gradient that a rank received; ``width`` is 0 if it was left out."""

    y1: float
    y2: float
    width: float


@dataclass(frozen=True)
class RankPaths:
    """Each rank's own gradient on the left, the gradient that its optimizer received on the right."""

    title: str
    sentence: str
    width: float
    height: float
    nodes: tuple[tuple[float, str], ...]
    links: tuple[Link, ...]
    received: tuple[tuple[float, str, bool], ...]
    right: str


def heat_map(finding: Result, *, wrong: bool) -> HeatMap | None:
    grid, limit = finding.error_grid, finding.limit_x_noise
    if grid is None or not grid.parameters or limit is None:
        return None

    def degree(error: float | None) -> int:
        if error is None or error <= limit:
            return -1 if error is None else 0
        times = error / max(limit, 1.0)
        return min(DEGREES, 1 + int(math.log10(max(times, 1.0)) / 3)) if math.isfinite(times) else DEGREES

    places = [
        (step, name, error)
        for name, errors in zip(grid.parameters, grid.errors, strict=False)
        for step, error in zip(grid.steps, errors, strict=False)
        if error is not None
    ]
    above = [place for place in places if not place[2] <= limit]
    of = f"{counted(len(places), 'error')} of {counted(len(grid.parameters), 'parameter')}"
    of += f" over {counted(len(grid.steps), 'step')}"
    sentence = f"None of {of} is above the limit of {x_noise(limit)}."
    if above:
        first = min(above, key=lambda place: (place[0], -place[2]))
        worst = max(above, key=lambda place: place[2])
        sentence = (
            f"{len(above)} of {of} are above the limit of {x_noise(limit)}: first at step {first[0]} in "
            f"{printable(first[1])}; the largest of these is {_text(worst[2])} × noise at step {worst[0]} in "
            f"{printable(worst[1])}."
        )
    labels = [shortened(printable(name), LONGEST_NAME) for name in grid.parameters]
    begin = round(LETTER * max(map(len, labels))) + 10
    squares = tuple(
        Square(begin + column * SQUARE_WIDTH, HEAD + row * SQUARE_HEIGHT, _text(error), degree(error))
        for row, errors in enumerate(grid.errors)
        for column, error in enumerate(errors)
    )
    return HeatMap(
        f"{'Wrong' if wrong else 'Right'}: {finding.cell}",
        sentence,
        begin + len(grid.steps) * SQUARE_WIDTH + 2,
        HEAD + len(labels) * SQUARE_HEIGHT + 2,
        tuple((HEAD + (row + 0.5) * SQUARE_HEIGHT, name) for row, name in enumerate(labels)),
        tuple((begin + (column + 0.5) * SQUARE_WIDTH, str(step)) for column, step in enumerate(grid.steps)),
        squares,
    )


def rank_paths(shares: RankShares | None) -> RankPaths | None:
    if shares is None or not shares.received:
        return None
    ranks = max(len(shares.right), len(shares.received), *map(len, shares.received))
    heights = [NODE_DISTANCE * (index + 0.5) for index in range(ranks)]
    largest = max([abs(weight) for row in shares.received for weight in row], default=0.0) or 1.0
    links = tuple(
        Link(heights[own], heights[rank], round(7 * abs(weight) / largest, 1))
        for rank, row in enumerate(shares.received)
        for own, weight in enumerate(row)
    )
    received = tuple(
        (heights[rank], _sum(row), not _alike(row, shares.right)) for rank, row in enumerate(shares.received)
    )
    wrong = [f"rank {rank} received {text}" for rank, (_, text, is_wrong) in enumerate(received) if is_wrong]
    return RankPaths(
        f"The gradient's path through the ranks at step {shares.step}",
        f"Right is {_sum(shares.right)}; {'; '.join(wrong) or 'every rank received that'}.",
        max(LEAST_WIDTH, RECEIVED_AT + BOLD_LETTER * max(len(text) + 2 for _, text, _ in received)),
        NODE_DISTANCE * len(heights),
        tuple((heights[rank], f"rank {rank}") for rank in range(len(shares.right))),
        links,
        received,
        _sum(shares.right),
    )


def _text(error: float | None) -> str:
    return "∞" if error == math.inf else "" if error is None else compact(error)


def _alike(row: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(math.isclose(one, other, rel_tol=0.01, abs_tol=0.001) for one, other in zip(row, right, strict=False))


def _sum(weights: tuple[float, ...]) -> str:
    if len(weights) > 2 and _alike(weights, weights[:1] * len(weights)):
        return f"{weights[0]:.3g} × each of {len(weights)} ranks"
    parts = [f"{weight:.3g} × rank {rank}" for rank, weight in enumerate(weights) if abs(weight) > 1e-3]
    return " + ".join(parts) or "nothing"


MOST_TIMELINES: Final = 12


@dataclass(frozen=True)
class PipelineTimeline:
    """One configuration's picture; ``sentence`` describes it for readers who cannot see it."""

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
    several = _have_several_stages(chunks)
    stages: dict[int, set[int]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.rank):
        stages.setdefault(chunk.rank, set()).add(chunk.stage)
    boxes = [
        Box(
            list(stages).index(chunk.rank),
            chunk.kind,
            f"{chunk.stage}:{chunk.micro_batch}" if several else str(chunk.micro_batch),
            chunk.begin,
            chunk.end,
            f"{chunk.kind} of micro-batch {chunk.micro_batch}, stage {chunk.stage}, rank {chunk.rank}: "
            f"{in_words(chunk.end - chunk.begin, 's')} from {in_words(chunk.begin, 's')} on",
        )
        for chunk in chunks
    ]
    rows = [
        f"rank {rank}, stage{'s' if len(own) > 1 else ''} {' and '.join(map(str, sorted(own)))}"
        for rank, own in stages.items()
    ]
    return timeline(title, rows, boxes)


def _have_several_stages(chunks: tuple[TimelineChunk, ...]) -> bool:
    return len({(chunk.rank, chunk.stage) for chunk in chunks}) > len({chunk.rank for chunk in chunks})


def _sentence(chunks: tuple[TimelineChunk, ...]) -> str:
    busy: dict[int, float] = {}
    for chunk in chunks:
        busy[chunk.rank] = busy.get(chunk.rank, 0.0) + chunk.end - chunk.begin
    span = max(chunk.end for chunk in chunks)
    shares = ", ".join(
        f"rank {rank} {in_words(seconds / (span or 1.0), 'share')}" for rank, seconds in sorted(busy.items())
    )
    stages = len({chunk.stage for chunk in chunks})
    labels = " Boxes are labelled stage:micro-batch." if _have_several_stages(chunks) else ""
    number = counted(1 + max(chunk.micro_batch for chunk in chunks), "micro-batch", "micro-batches")
    return f"{counted(stages, 'stage')}, {number}, {in_words(span, 's')}; computing: {shares}.{labels}"
