"""A comparison as Markdown: for a pull request's comment, or a summary of a CI job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.report.comparison.comparison import Comparison
from harness.report.comparison.figure_lines import LEGEND, lines_of
from harness.report.comparison.words import ends, headline, machines_in_words, reasons, remarks
from harness.report.text import markdown

MOST_LINES: Final = 200
MOST_REASONS: Final = 20


def page(comparison: Comparison) -> str:
    """Return the comparison as GitHub Markdown."""
    blocks = [f"**{markdown(headline(comparison))}**"]
    blocks += [f"> **INCOMPLETE: {markdown(sentence)}**" for sentence in comparison.incomplete]
    if comparison.machine:
        blocks.append(markdown(machines_in_words(comparison)))
    if comparison.outcomes:
        rows = [(change.kind.value, *ends(change)) for change in comparison.outcomes]
        blocks.append(_table(("Outcome", "Cell", "A", "B"), "llll", rows))
    if comparison.figures and not comparison.machine:
        names = ("Cell", "Figure", "A → B", "Change, %", "95 % interval", "Verdict")
        figures = [
            (line.cell, line.figure, line.amounts, line.change, line.interval, line.verdict.value)
            for line in lines_of(comparison.figures)
        ]
        blocks.append(_table(names, "llrrrl", figures))
        blocks.append(_list([LEGEND, *reasons(comparison, MOST_REASONS)]))
    blocks.append(_list(remarks(comparison)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _table(names: Sequence[str], alignment: str, rows: Sequence[Sequence[str]]) -> str:
    rules = ["--:" if side == "r" else "---" for side in alignment]
    lines = [names, rules, *([markdown(part) for part in row] for row in rows[:MOST_LINES])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    left = len(rows) - MOST_LINES
    return f"{table}\n\n… and {left} more: `--format json` has all of them" if left > 0 else table


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(line)}" for line in lines)
