"""Writes the site: ``index.html`` and a badge for each subject. Nothing in it needs a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from jinja2 import Environment

from plumbline.report.history.changes import (
    FoundRuns,
    Step,
    all_steps,
    anchor,
    counts,
    find_runs,
    in_words,
    label,
    link_to,
    own_code,
)
from plumbline.report.history.histories import CellHistory, FigureHistory, cell_histories, figure_histories, is_examined
from plumbline.report.history.pictures import badge_of, curve
from plumbline.report.html.environment import page_environment
from plumbline.report.tables.cells import counts_in_words
from plumbline.report.text import counted
from plumbline.results.atomic import write_text
from plumbline.results.records import KNOWN, grouped
from plumbline.results.run import Run

INDEX: Final = "index.html"
BADGES: Final = "badges"
MOST_STEPS: Final = 100
MOST_NAMED: Final = 4
MOST_REASONS: Final = 12


@dataclass(frozen=True)
class SubjectSection:
    """What the page says of one subject: cells that changed or are wrong, the others by how they end, and figures."""

    name: str
    cells: tuple[CellHistory, ...]
    steady: dict[str, list[CellHistory]]
    figures: tuple[FigureHistory, ...]
    figures_that_changed: int


def write_site(folder: Path, site: Path) -> FoundRuns:
    """Write the site about the runs below ``folder`` to ``site``, which is made; return the runs.

    Raises:
        RunNotFound: there is no run that can be read.
        OSError: a file cannot be written.
    """
    found = find_runs(folder)
    cells, figures = cell_histories(found.runs), figure_histories(found.runs)
    steps = all_steps(cells, figures)
    (site / BADGES).mkdir(parents=True, exist_ok=True)
    for subject, own in grouped(cells, lambda cell: cell.subject).items():
        write_text(site / BADGES / f"{anchor(subject)}.svg", badge_of(own))
    links = {run.header.run_id: link_to(run, site, folder) for run in found.runs}
    write_text(site / INDEX, _page(found, cells, figures, steps, links))
    return found


def _page(
    found: FoundRuns,
    cells: Sequence[CellHistory],
    figures: Sequence[FigureHistory],
    steps: Sequence[Step],
    links: dict[str, str | None],
) -> str:
    wrong = [cell for cell in cells if cell.now.end.wrong]
    worse = sum(figure.changes[-1].worse is True for figure in figures if figure.changes)
    return (
        _environment()
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
            links=links,
            anchor=anchor,
            badges=BADGES,
            curve=curve,
            change_in_words=in_words,
            label=label,
            most_named=MOST_NAMED,
            most_reasons=MOST_REASONS,
            own_code=own_code,
            ends=_ends(found.runs, cells),
        )
    )


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
    return [
        _section(name, examined.get(name, []), measured.get(name, [])) for name in dict.fromkeys([*examined, *measured])
    ]


def _section(name: str, cells: list[CellHistory], figures: list[FigureHistory]) -> SubjectSection:
    shown = filter(_is_shown, cells)
    steady = grouped((cell for cell in cells if not _is_shown(cell)), lambda cell: str(cell.now.end))
    return SubjectSection(
        name,
        tuple(sorted(shown, key=lambda cell: (not cell.now.end.wrong, cell.cell))),
        steady,
        tuple(sorted(figures, key=lambda figure: not figure.changes)),
        sum(bool(figure.changes) for figure in figures),
    )


def _is_shown(cell: CellHistory) -> bool:
    return len(cell.spans) > 1 or cell.now.end.wrong


def _ends(runs: Sequence[Run], cells: Sequence[CellHistory]) -> dict[str, str]:
    outcomes: dict[str, list[str]] = {run.header.run_id: [] for run in runs}
    for cell in cells:
        for span in cell.spans:
            for run in span.runs:
                outcomes[run.header.run_id].append(span.end.outcome)
    return {run: counts_in_words(ends) for run, ends in outcomes.items()}


@cache
def _environment() -> Environment:
    return page_environment("plumbline.report.history")
