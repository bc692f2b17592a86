"""A comparison in words: its headline, and what must be said beside its tables."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.comparison.changes import Kind, Verdict
from harness.report.comparison.comparison import Comparison
from harness.report.comparison.figure_lines import cell_in_words
from harness.report.comparison.figures import FigureChange
from harness.report.comparison.outcomes import OutcomeChange
from harness.report.text import printable, shortened

_LONGEST_REMARK = 500


def headline(comparison: Comparison) -> str:
    """Return the whole comparison in a sentence."""
    parts = [part for part in (_outcomes(comparison), _figures(comparison)) if part]
    whose = f"By {comparison.by}: " if comparison.by else ""
    return f"{whose}{_lead(comparison)}: {'; '.join(parts)}."


def _lead(comparison: Comparison) -> str:
    b, a = ("what is compared", "its baseline") if comparison.by else ("B", "A")
    verdicts, kinds = comparison.verdicts(), comparison.kinds()
    worse = any(change.worse for change in comparison.outcomes) or verdicts[Verdict.WORSE] > 0
    better = kinds[Kind.FIXED] > 0 or verdicts[Verdict.BETTER] > 0
    if worse:
        return f"{b} is partly better and partly worse than {a}" if better else f"{b} is worse than {a}"
    if better:
        return f"{b} is better than {a}"
    if verdicts[Verdict.INCONCLUSIVE] or verdicts[Verdict.NOT_COMPARABLE] or comparison.incomplete:
        return f"{b} was not found to differ from {a}, but not everything could be told"
    return f"{b} is nowhere worse than {a}" if kinds else f"{b} is the same as {a}"


def _outcomes(comparison: Comparison) -> str:
    kinds = comparison.kinds()
    changed = [f"{kinds[kind]} {kind.value}" for kind in Kind if kinds[kind]]
    return "cells: " + ", ".join([*changed, f"{comparison.as_before} as before"])


def _figures(comparison: Comparison) -> str:
    verdicts = comparison.verdicts()
    said = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict if verdicts[verdict])
    return f"figures: {said}" if said else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ends(change: OutcomeChange) -> tuple[str, str, str]:
    """Return the cell of a change, how it ended, and how it ends."""
    return cell_in_words(change.cell, change.versus), printable(change.was), printable(change.now)


def machines_in_words(comparison: Comparison) -> str:
    """Return why no figure is compared, and in what the machines differ."""
    differences = "; ".join(map(str, comparison.machine))
    return printable(f"Speed and memory are not comparable, because the machines differ: {differences}.")


def remarks(comparison: Comparison) -> list[str]:
    """Return what must be said below the tables, beside the reasons."""
    lines = list(comparison.notes)
    if comparison.software:
        lines.append(f"Not the same either: {'; '.join(map(str, comparison.software))}.")
    return [shortened(printable(line), _LONGEST_REMARK) for line in lines]


def reasons(comparison: Comparison, most: int) -> list[str]:
    """Return why figures have no verdict, the most frequent reason first, at most ``most`` lines."""
    found: dict[tuple[Verdict, str], list[FigureChange]] = {}
    for change in comparison.figures:
        if change.reason:
            found.setdefault((change.verdict, change.reason), []).append(change)
    lines = [
        printable(f"{verdict.value}, {_counted(len(changes), 'figure')}: {reason}{_enough(changes)}")
        for (verdict, reason), changes in sorted(found.items(), key=lambda group: -len(group[1]))
    ]
    return lines if len(lines) <= most else [*lines[: most - 1], f"… and {len(lines) - most + 1} more reasons"]


def _enough(changes: Sequence[FigureChange]) -> str:
    needed = sorted(change.enough for change in changes if change.enough)
    if not needed:
        return ""
    numbers = str(needed[0]) if needed[0] == needed[-1] else f"{needed[0]:,} to {needed[-1]:,}"
    return f" (by their noise, about {numbers} launches a side would tell)"
