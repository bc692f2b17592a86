"""The site about many runs: ``index.html``, and a badge for each subject. It works without a network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from plumbline.core.numbers import counted
from plumbline.report.badge import BAD, GOOD, UNCLEAR, badge
from plumbline.report.history.histories import (
    CellHistory,
    FigureHistory,
    FoundRuns,
    all_steps,
    anchor,
    cell_histories,
    counts,
    figure_histories,
    find_runs,
    in_words,
    is_examined,
    label,
    link_to,
    own_code,
)
from plumbline.report.html.environment import page_environment
from plumbline.report.tables.cells import counts_in_words
from plumbline.results.files import write_text
from plumbline.results.records import KNOWN, grouped

WIDTH, HEIGHT, MARGIN = 160.0, 36.0, 4.0


@dataclass(frozen=True)
class Point:
    """The figure of one run: its position and the ends of its interval, in pixels."""

    x: float
    y: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Curve:
    """A drawn history. ``levels`` has the start, end and height of each level stretch, ``cuts`` where it changed."""

    points: tuple[Point, ...]
    levels: tuple[tuple[float, float, float], ...]
    cuts: tuple[float, ...]


def curve(history: FigureHistory) -> Curve:
    figures = [one for _, one in history.points]
    lows = [one.value if one.low is None else one.low for one in figures]
    highs = [one.value if one.high is None else one.high for one in figures]
    least, most = min(low for low in lows if low is not None), max(high for high in highs if high is not None)

    def y(value: float | None) -> float:
        assert value is not None
        share = (value - least) / (most - least) if most > least else 0.5
        return round(HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN), 1)

    places = list(_places(len(figures)))
    points = tuple(
        Point(x, y(one.value), y(high), y(low)) for x, one, low, high in zip(places, figures, lows, highs, strict=True)
    )
    ends = [0, *(change.index for change in history.changes), len(points)]
    levels = []
    for begin, end in pairwise(ends):
        values = [one.value for one in figures[begin:end] if one.value is not None]
        levels.append((points[begin].x, points[end - 1].x, y(sum(values) / len(values))))
    cuts = tuple((points[change.index - 1].x + points[change.index].x) / 2 for change in history.changes)
    return Curve(points, tuple(levels), cuts)


def _places(count: int) -> Iterator[float]:
    step = (WIDTH - 2 * MARGIN) / max(1, count - 1)
    yield from (round(MARGIN + index * step, 1) if count > 1 else WIDTH / 2 for index in range(count))


def badge_of(cells: Sequence[CellHistory]) -> str:
    examined = [cell for cell in cells if is_examined(cell)]
    wrong = sum(cell.now.end.wrong for cell in examined)
    known = sum(cell.now.end.outcome == KNOWN for cell in examined)
    if wrong:
        return badge("plumbline", f"{wrong} of {counted(len(examined), 'cell')} wrong", BAD)
    if not examined:
        return badge("plumbline", "nothing examined", UNCLEAR)
    right = f"{counted(len(examined) - known, 'cell')} right"
    return badge("plumbline", f"{right}, {counted(known, 'known failure')}" if known else right, GOOD)


INDEX: Final = "index.html"
BADGES: Final = "badges"
MOST_STEPS: Final = 100
MOST_NAMED: Final = 4
MOST_REASONS: Final = 12


@dataclass(frozen=True)
class SubjectSection:
    """What the page shows of one subject: cells that changed or are wrong, the others by how they end, and figures."""

    name: str
    cells: tuple[CellHistory, ...]
    steady: dict[str, list[CellHistory]]
    figures: tuple[FigureHistory, ...]
    figures_that_changed: int


def write_site(folder: Path, site: Path) -> FoundRuns:
    """Write the site about the runs below ``folder`` to the folder ``site``, creating it; return the runs."""
    found = find_runs(folder)
    cells, figures = cell_histories(found.runs), figure_histories(found.runs)
    steps = all_steps(cells, figures)
    (site / BADGES).mkdir(parents=True, exist_ok=True)
    badges = {subject: badge_of(own) for subject, own in grouped(cells, lambda cell: cell.subject).items()}
    for subject, drawn in badges.items():
        write_text(site / BADGES / f"{anchor(subject)}.svg", drawn)
    wrong = [cell for cell in cells if cell.now.end.wrong]
    worse = sum(figure.changes[-1].worse is True for figure in figures if figure.changes)
    outcomes: dict[str, list[str]] = {run.header.run_id: [] for run in found.runs}
    for cell in cells:
        for span in cell.spans:
            for run in span.runs:
                outcomes[run.header.run_id].append(span.end.outcome)
    page = (
        page_environment("plumbline.report.history")
        .get_template("history.html.jinja")
        .render(
            runs=found.runs[::-1],
            unreadable=found.unreadable,
            headline=_headline(cells, wrong, worse),
            kind="bad" if wrong or worse else "good" if any(map(is_examined, cells)) else "unclear",
            counts=counts(steps),
            steps=steps[:MOST_STEPS],
            more=max(0, len(steps) - MOST_STEPS),
            subjects=_sections(cells, figures),
            links={run.header.run_id: link_to(run, site, folder) for run in found.runs},
            anchor=anchor,
            badges=BADGES,
            drawn_badges={name: b64encode(drawn.encode()).decode() for name, drawn in badges.items()},
            curve=curve,
            change_in_words=in_words,
            label=label,
            most_named=MOST_NAMED,
            most_reasons=MOST_REASONS,
            own_code=own_code,
            ends={run: counts_in_words(ends) for run, ends in outcomes.items()},
        )
    )
    write_text(site / INDEX, page)
    return found


def _headline(cells: Sequence[CellHistory], wrong: Sequence[CellHistory], worse: int) -> str:
    ends = [cell.now.end.outcome for cell in cells if is_examined(cell)]
    verb = "was" if len(ends) == 1 else "were"
    newest = f"in {'its' if len(ends) == 1 else 'their'} newest run"
    known = f", {ends.count(KNOWN)} of them as known failures" if KNOWN in ends else ""
    first = (
        f"{len(wrong)} of {counted(len(ends), 'cell')} went wrong {newest}"
        if wrong
        else f"{counted(len(ends), 'cell')} ended as expected {newest}{known}"
        if known
        else f"{'All ' if len(ends) > 1 else ''}{counted(len(ends), 'cell')} {verb} right {newest}"
        if ends
        else "No cell was examined"
    )
    second = f"; {counted(worse, 'figure')} became worse" if worse else ""
    return f"{first}{second}."


def _sections(cells: Sequence[CellHistory], figures: Sequence[FigureHistory]) -> list[SubjectSection]:
    measured = grouped(figures, lambda figure: figure.subject)
    examined = grouped(cells, lambda cell: cell.subject)
    sections = []
    for name in dict.fromkeys([*examined, *measured]):
        own, curves = examined.get(name, []), measured.get(name, [])
        shown = sorted(filter(_is_shown, own), key=lambda cell: (not cell.now.end.wrong, cell.cell))
        steady = grouped((cell for cell in own if not _is_shown(cell)), lambda cell: str(cell.now.end))
        ordered = sorted(curves, key=lambda figure: not figure.changes)
        changed = sum(bool(figure.changes) for figure in curves)
        sections.append(SubjectSection(name, tuple(shown), steady, tuple(ordered), changed))
    return sections


def _is_shown(cell: CellHistory) -> bool:
    return len(cell.spans) > 1 or cell.now.end.wrong
