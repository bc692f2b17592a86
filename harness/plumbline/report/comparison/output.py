"""A comparison as text for a terminal, as GitHub Markdown, and as JSON: one function a format, all in ``FORMATS``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from plumbline.report.comparison.compare import Comparison
from plumbline.report.comparison.figure_changes import FigureVerdict
from plumbline.report.comparison.presentation import (
    LEGEND,
    FigureLine,
    figure_lines,
    headline,
    machines_in_words,
    outcome_texts,
    reasons,
    remarks,
)
from plumbline.report.terminal.console import plain_table, rendered
from plumbline.report.text import markdown, markdown_table, printable
from plumbline.statistics.intervals import CONFIDENCE

SCHEMA_VERSION: Final = 1
NARROWEST: Final = 100
MOST_TERMINAL_LINES: Final = 40
MOST_TERMINAL_REASONS: Final = 8
MOST_MARKDOWN_LINES: Final = 200
MOST_MARKDOWN_REASONS: Final = 20
_COLOURS = {FigureVerdict.WORSE: "bold red", FigureVerdict.BETTER: "green", FigureVerdict.SAME: "dim"}
_OUTCOME_COLUMNS: Final = ("Outcome", "Cell", "A", "B")


def as_text(comparison: Comparison, width: int = NARROWEST, *, colour: bool = False) -> str:
    """Return the comparison for a terminal, in lines of at most ``width``; 100 characters hold every figure whole."""
    return rendered(*_parts(comparison), width=width, colour=colour)


def as_markdown(comparison: Comparison) -> str:
    """Return the comparison as GitHub Markdown: for a comment on a pull request, or the summary of a CI job."""
    blocks = [f"**{markdown(headline(comparison))}**"]
    blocks += [f"> **INCOMPLETE: {markdown(sentence)}**" for sentence in comparison.incomplete]
    if comparison.machine:
        blocks.append(markdown(machines_in_words(comparison)))
    if comparison.outcomes:
        rows = [(change.kind.value, *outcome_texts(change)) for change in comparison.outcomes]
        blocks.append(_markdown(_OUTCOME_COLUMNS, "llll", rows))
    if comparison.figures and not comparison.machine:
        names = ("Cell", "Figure", "A → B", "Change, %", "95 % interval", "Verdict")
        figures = [
            (line.cell, line.figure, line.amounts, line.change, line.interval, line.verdict.value)
            for line in figure_lines(comparison.figures)
        ]
        blocks.append(_markdown(names, "llrrrl", figures))
    for lines in _closing(comparison, MOST_MARKDOWN_REASONS):
        blocks.append("\n".join(f"- {markdown(line)}" for line in lines))
    return "\n\n".join(filter(None, blocks)) + "\n"


def as_json(comparison: Comparison, gates: Sequence[str], exit_code: int) -> str:
    """Return the comparison as one object. ``gates`` are those that caught something. A missing number is null."""
    fields: dict[str, Any] = asdict(comparison)
    for change in (*fields["outcomes"], *fields["figures"]):
        change.update({name: change[name].value for name in ("kind", "verdict") if name in change})
    values = {
        "schema_version": SCHEMA_VERSION,
        "headline": headline(comparison),
        "confidence": CONFIDENCE,
        **fields,
        "verdicts": {verdict.value: count for verdict, count in comparison.verdicts().items()},
        "gates": list(gates),
        "exit_code": exit_code,
    }
    return json.dumps(values, indent=2, allow_nan=False)  # in ASCII: it may be printed


def _for_this_terminal(comparison: Comparison) -> str:
    width = max(NARROWEST, shutil.get_terminal_size((NARROWEST, 24)).columns)
    return as_text(comparison, width, colour=sys.stdout.isatty())


FORMATS: Final[Mapping[str, Callable[[Comparison, Sequence[str], int], str]]] = {
    "text": lambda comparison, gates, exit_code: _for_this_terminal(comparison),
    "md": lambda comparison, gates, exit_code: as_markdown(comparison).rstrip("\n"),
    "json": as_json,
}
"""The formats of ``plumbline compare --format``, the default first."""


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    yield Text(headline(comparison), style="bold")
    for sentence in comparison.incomplete:
        yield Text(f"INCOMPLETE: {printable(sentence)}", style="bold red")
    if comparison.machine:
        yield Text(machines_in_words(comparison), style="yellow")
    if comparison.outcomes:
        yield _outcomes(comparison)
    if comparison.figures and not comparison.machine:
        yield _figures(figure_lines(comparison.figures))
    for lines in _closing(comparison, MOST_TERMINAL_REASONS):
        yield from map(Text, lines)


def _closing(comparison: Comparison, most_reasons: int) -> Iterator[list[str]]:
    if comparison.figures and not comparison.machine:
        yield [LEGEND, *reasons(comparison, most_reasons)]
    yield remarks(comparison)


def _outcomes(comparison: Comparison) -> Table:
    table = plain_table()
    for name in _OUTCOME_COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name == "Outcome")
    for change in comparison.outcomes[:MOST_TERMINAL_LINES]:
        kind = Text(change.kind.value, style="bold red" if change.worse else "")
        table.add_row(kind, *map(Text, outcome_texts(change)))
    if (left := len(comparison.outcomes) - MOST_TERMINAL_LINES) > 0:
        table.add_row(f"… {left} more", "--format json has all of them", "", "")
    return table


def _figures(lines: Sequence[FigureLine]) -> Table:
    table = plain_table()
    table.add_column("Cell, and its figures", overflow="fold")
    for name in ("A → B", "Change\n%", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    cell = ""
    for line in lines[:MOST_TERMINAL_LINES]:
        if line.cell != cell:
            cell = line.cell
            table.add_row(Text(cell, style="bold"))
        figures = (f"  {line.figure}", line.amounts, line.change, line.interval)
        table.add_row(*map(Text, figures), Text(line.verdict.value, style=_COLOURS.get(line.verdict, "")))
    if left := lines[MOST_TERMINAL_LINES:]:
        table.add_row(f"… {len(left)} more lines: --format json has all")
    return table


def _markdown(names: Sequence[str], alignment: str, rows: Sequence[Sequence[str]]) -> str:
    table = markdown_table(names, alignment, ([*map(markdown, row)] for row in rows[:MOST_MARKDOWN_LINES]))
    left = len(rows) - MOST_MARKDOWN_LINES
    return f"{table}\n\n… and {left} more: `--format json` has all of them" if left > 0 else table
