"""A comparison for a terminal: the headline, outcomes, figures (worst first), and what must be said beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from harness.report.comparison.changes import Verdict
from harness.report.comparison.comparison import Comparison
from harness.report.comparison.figure_lines import LEGEND, Line, lines_of
from harness.report.comparison.words import ends, headline, machines_in_words, reasons, remarks
from harness.report.terminal.console import rendered
from harness.report.text import printable

MOST_LINES: Final = 40
MOST_REASONS: Final = 8
_COLOURS = {Verdict.WORSE: "bold red", Verdict.BETTER: "green", Verdict.SAME: "dim"}


def for_terminal(comparison: Comparison, width: int = 100, *, colour: bool = False) -> str:
    """Return the comparison in lines of at most ``width``; 100 columns hold every figure whole."""
    return rendered(*_parts(comparison), width=width, colour=colour)


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    yield Text(headline(comparison), style="bold")
    for sentence in comparison.incomplete:
        yield Text(f"INCOMPLETE: {printable(sentence)}", style="bold red")
    if comparison.machine:
        yield Text(machines_in_words(comparison), style="yellow")
    if comparison.outcomes:
        yield _outcomes(comparison)
    if comparison.figures and not comparison.machine:
        yield _figures(lines_of(comparison.figures))
    yield from map(Text, _closing(comparison))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _outcomes(comparison: Comparison) -> Table:
    table = _table()
    for name in ("Outcome", "Cell", "A", "B"):
        table.add_column(name, overflow="fold", no_wrap=name == "Outcome")
    for change in comparison.outcomes[:MOST_LINES]:
        table.add_row(Text(change.kind.value, style="bold red" if change.worse else ""), *map(Text, ends(change)))
    if (left := len(comparison.outcomes) - MOST_LINES) > 0:
        table.add_row(f"… {left} more", "--format json has all of them", "", "")
    return table


def _figures(lines: Sequence[Line]) -> Table:
    table = _table()
    table.add_column("Cell, and its figures", overflow="fold")
    for name in ("A → B", "Change\n%", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    cell = ""
    for line in lines[:MOST_LINES]:
        if line.cell != cell:
            cell = line.cell
            table.add_row(Text(cell, style="bold"))
        figures = (f"  {line.figure}", line.amounts, line.change, line.interval)
        table.add_row(*map(Text, figures), Text(line.verdict.value, style=_COLOURS.get(line.verdict, "")))
    if left := lines[MOST_LINES:]:
        table.add_row(f"… {len(left)} more lines: --format json has all")
    return table


def _closing(comparison: Comparison) -> list[str]:
    if comparison.machine or not comparison.figures:
        return remarks(comparison)
    return [LEGEND, *reasons(comparison, MOST_REASONS), *remarks(comparison)]
