"""What every output format of a comparison shows: the headline, the lines of the table of figures, the remarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from plumbline.report.comparison.compare import Comparison
from plumbline.report.comparison.figure_changes import FigureChange, FigureVerdict
from plumbline.report.comparison.outcomes import OutcomeChange, OutcomeKind
from plumbline.report.text import counted, in_words, printable, shortened
from plumbline.results.records import grouped

LEGEND: Final = "↑ higher is better, ↓ lower is better; pp: percentage points; intervals: 95 % for each figure"
_LONGEST_REMARK: Final = 500
_ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


@dataclass(frozen=True)
class FigureLine:
    """One figure as text; or those of several ranks with the same verdict, represented by the worst."""

    cell: str
    figure: str
    amounts: str
    change: str
    interval: str
    verdict: FigureVerdict


def figure_lines(figures: Iterable[FigureChange]) -> list[FigureLine]:
    every = list(figures)
    moved = grouped((change for change in every if change.verdict is not FigureVerdict.SAME), _line)
    same = grouped((change for change in every if change.verdict is FigureVerdict.SAME), lambda change: change.metric)
    return [*map(_moved, moved.values()), *map(_same, same.values())]


def _line(change: FigureChange) -> tuple[object, ...]:
    return change.cell, change.versus, change.metric, change.rank is None, change.verdict, change.reason


def _moved(changes: Sequence[FigureChange]) -> FigureLine:
    worst = changes[0]
    ranks = sorted(change.rank for change in changes if change.rank is not None)
    return FigureLine(
        cell=cell_text(worst.cell, worst.versus),
        figure=" ".join(filter(None, (_metric(worst), _ranks(ranks)))),
        amounts=_amounts(worst.a, worst.b, worst.unit),
        change=_shift(worst.change, worst.change_unit),
        interval=_interval([worst]),
        verdict=worst.verdict,
    )


def _same(changes: Sequence[FigureChange]) -> FigureLine:
    if len(changes) == 1:
        return _moved(changes)
    cells = len({(change.cell, change.versus) for change in changes})
    return FigureLine(
        cell=f"the same in {cells} cells" if cells > 1 else cell_text(changes[0].cell, changes[0].versus),
        figure=_metric(changes[0]),
        amounts="",
        change="",
        interval=_interval(changes),
        verdict=FigureVerdict.SAME,
    )


def cell_text(cell: str, versus: str) -> str:
    return printable(f"{cell}, {versus}" if versus else cell)


def _metric(change: FigureChange) -> str:
    return printable(change.metric) + _ARROWS.get(change.better, "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    whole = len(ranks) == ranks[-1] - ranks[0] + 1
    return f"ranks {ranks[0]}–{ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"


def _amounts(a: float | None, b: float | None, unit: str) -> str:
    before, after = ("–" if value is None else printable(in_words(value, unit)) for value in (a, b))
    number, _, size = after.partition(" ")
    return f"{before.removesuffix(f' {size}')} → {after}" if number and size else f"{before} → {after}"


def _shift(change: float | None, unit: str) -> str:
    if change is None:
        return ""
    shown = change if unit == "" else 100 * change
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(shown, 1) + 0.0:+,.1f}{' pp' if unit == 'points' else ''}"


def _interval(changes: Sequence[FigureChange]) -> str:
    low = min((change.low for change in changes if change.low is not None), default=None)
    high = max((change.high for change in changes if change.high is not None), default=None)
    if low is None or high is None:
        return ""
    unit = changes[0].change_unit
    return f"{_shift(low, unit).removesuffix(' pp')} … {_shift(high, unit)}"


def headline(comparison: Comparison) -> str:
    parts = [part for part in (_outcomes(comparison), _figures(comparison)) if part]
    whose = f"By {comparison.by}: " if comparison.by else ""
    sentence = f"{whose}{_lead(comparison)}: {'; '.join(parts)}."
    return sentence[0].upper() + sentence[1:]


def _lead(comparison: Comparison) -> str:
    b, a = ("the compared value", "the baseline") if comparison.by else ("B", "A")
    verdicts, kinds = comparison.verdicts(), comparison.kinds()
    worse = any(change.worse for change in comparison.outcomes) or verdicts[FigureVerdict.WORSE] > 0
    better = kinds[OutcomeKind.FIXED] > 0 or verdicts[FigureVerdict.BETTER] > 0
    if worse:
        return f"{b} is partly better and partly worse than {a}" if better else f"{b} is worse than {a}"
    if better:
        return f"{b} is better than {a}"
    if verdicts[FigureVerdict.INCONCLUSIVE] or verdicts[FigureVerdict.NOT_COMPARABLE] or comparison.incomplete:
        return f"no difference between {b} and {a} was found, but some comparisons are inconclusive"
    return f"{b} is no worse than {a}" if kinds else f"{b} is the same as {a}"


def _outcomes(comparison: Comparison) -> str:
    kinds = comparison.kinds()
    changed = [f"{kinds[kind]} {kind.value}" for kind in OutcomeKind if kinds[kind]]
    return "cells: " + ", ".join([*changed, f"{comparison.as_before} as before"])


def _figures(comparison: Comparison) -> str:
    verdicts = comparison.verdicts()
    counts = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in FigureVerdict if verdicts[verdict])
    return f"figures: {counts}" if counts else ""


def outcome_texts(change: OutcomeChange) -> tuple[str, str, str]:
    return cell_text(change.cell, change.versus), printable(change.was), printable(change.now)


def machines_in_words(comparison: Comparison) -> str:
    differences = "; ".join(map(str, comparison.machine))
    return printable(f"Speed and memory are not comparable, because the machines differ: {differences}.")


def remarks(comparison: Comparison) -> list[str]:
    lines = list(comparison.notes)
    if comparison.software:
        lines.append(f"Other differences: {'; '.join(map(str, comparison.software))}.")
    return [shortened(printable(line), _LONGEST_REMARK) for line in lines]


def reasons(comparison: Comparison, most: int) -> list[str]:
    explained = (change for change in comparison.figures if change.reason)
    found = grouped(explained, lambda change: (change.verdict, change.reason))
    lines = [
        printable(f"{verdict.value}, {counted(len(changes), 'figure')}: {reason}{_enough(changes)}")
        for (verdict, reason), changes in sorted(found.items(), key=lambda group: -len(group[1]))
    ]
    return lines if len(lines) <= most else [*lines[: most - 1], f"… and {len(lines) - most + 1} more reasons"]


def _enough(changes: Sequence[FigureChange]) -> str:
    needed = sorted(change.enough for change in changes if change.enough)
    if not needed:
        return ""
    numbers = str(needed[0]) if needed[0] == needed[-1] else f"{needed[0]:,} to {needed[-1]:,}"
    return f" (at this noise, about {numbers} launches a side would decide)"
