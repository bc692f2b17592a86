"""The lines of the table of figures: what changed, line by line and worst first; what did not, a line a metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.report.comparison.changes import Verdict
from harness.report.comparison.figures import FigureChange
from harness.report.html.scales import in_words
from harness.report.text import printable

_ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}
LEGEND = "↑ higher is better, ↓ lower is better; pp: points of a share; intervals: 95 %, each figure's own"


@dataclass(frozen=True)
class Line:
    """One figure, in words; or those of several ranks that share a verdict, of which it shows the worst."""

    cell: str
    figure: str
    amounts: str
    change: str
    interval: str
    verdict: Verdict


def lines_of(figures: Iterable[FigureChange]) -> list[Line]:
    """Return the lines of the table, in the order of the figures. Figures that are the same are told by metric."""
    moved: dict[tuple[object, ...], list[FigureChange]] = {}
    same: dict[str, list[FigureChange]] = {}
    for change in figures:
        if change.verdict is Verdict.SAME:
            same.setdefault(change.metric, []).append(change)
        else:
            key = (change.cell, change.versus, change.metric, change.rank is None, change.verdict, change.reason)
            moved.setdefault(key, []).append(change)
    return [*map(_moved, moved.values()), *map(_same, same.values())]


def _moved(changes: Sequence[FigureChange]) -> Line:
    worst = changes[0]
    ranks = sorted(change.rank for change in changes if change.rank is not None)
    return Line(
        cell=cell_in_words(worst.cell, worst.versus),
        figure=" ".join(filter(None, (_metric(worst), _ranks(ranks)))),
        amounts=_amounts(worst.a, worst.b, worst.unit),
        change=_shift(worst.change, worst.change_unit),
        interval=_interval([worst]),
        verdict=worst.verdict,
    )


def _same(changes: Sequence[FigureChange]) -> Line:
    """Return one line for a metric that is the same in several cells, or ranks: within what bounds, all of them."""
    if len(changes) == 1:
        return _moved(changes)
    cells = len({(change.cell, change.versus) for change in changes})
    return Line(
        cell=f"the same in {cells} cells" if cells > 1 else cell_in_words(changes[0].cell, changes[0].versus),
        figure=_metric(changes[0]),
        amounts="",
        change="",
        interval=_interval(changes),
        verdict=Verdict.SAME,
    )


def cell_in_words(cell: str, versus: str) -> str:
    """Return a cell, and within a run what of it is held against what."""
    return printable(f"{cell}, {versus}" if versus else cell)


def _metric(change: FigureChange) -> str:
    return printable(change.metric) + _ARROWS.get(change.better, "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) < 2:
        return "".join(f"rank {rank}" for rank in ranks)
    whole = len(ranks) == ranks[-1] - ranks[0] + 1
    return f"ranks {ranks[0]}–{ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"


def _amounts(a: float | None, b: float | None, unit: str) -> str:
    """Return both figures, with their unit once if it is the same."""
    before, after = ("–" if value is None else printable(in_words(value, unit)) for value in (a, b))
    number, _, size = after.partition(" ")
    return f"{before.removesuffix(f' {size}')} → {after}" if number and size else f"{before} → {after}"


def _shift(change: float | None, unit: str) -> str:
    if change is None:
        return ""
    shown = change if unit == "" else 100 * change
    # Half a step below zero would else be shown as "-0.0".
    return f"{round(shown, 1) + 0.0:+,.1f}{' pp' if unit == 'points' else ''}"


def _interval(changes: Sequence[FigureChange]) -> str:
    """Return the bounds that hold all of the changes' intervals."""
    low = min((change.low for change in changes if change.low is not None), default=None)
    high = max((change.high for change in changes if change.high is not None), default=None)
    if low is None or high is None:
        return ""
    unit = changes[0].change_unit
    return f"{_shift(low, unit).removesuffix(' pp')} … {_shift(high, unit)}"
