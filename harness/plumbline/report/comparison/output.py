"""A comparison as text for a terminal, as GitHub Markdown, and as JSON: one function per format, see ``FORMATS``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from plumbline.core.numbers import counted
from plumbline.report.comparison.compare import Comparison, OutcomeChange, OutcomeKind
from plumbline.report.comparison.figure_changes import FigureChange, FigureVerdict
from plumbline.report.terminal import plain_table, rendered
from plumbline.report.text import in_words, listed, markdown, markdown_table, printable, shortened
from plumbline.results.records import grouped
from plumbline.statistics.intervals import CONFIDENCE

LEGEND: Final = "↑ higher is better, ↓ lower is better; pp: percentage points; intervals: 95 % for each figure"
_LONGEST_REMARK: Final = 500
_ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


@dataclass(frozen=True)
class FigureLine:
    """One figure, or several with the same verdict, as text. The worst rank represents the others."""

    cell: str
    figure: str
    amounts: str
    change: str
    interval: str
    verdict: FigureVerdict


def figure_lines(figures: Iterable[FigureChange]) -> list[FigureLine]:
    every = list(figures)
    moved = grouped(
        (change for change in every if change.verdict not in (FigureVerdict.SAME, FigureVerdict.INCONCLUSIVE)),
        lambda one: (one.cell, one.versus, one.metric, one.rank is None, one.verdict, one.reason),
    )
    same = grouped((change for change in every if change.verdict is FigureVerdict.SAME), lambda change: change.metric)
    unclear = [change for change in every if change.verdict is FigureVerdict.INCONCLUSIVE]
    return [*map(_moved, moved.values()), *_unclear(unclear), *map(_same, same.values())]


def _moved(changes: Sequence[FigureChange]) -> FigureLine:
    worst = changes[0]
    ranks = sorted(change.rank for change in changes if change.rank is not None)
    shown = ", ".join(map(str, ranks))
    if len(ranks) > 1 and len(ranks) == ranks[-1] - ranks[0] + 1:
        shown = f"{ranks[0]}–{ranks[-1]}"
    whose = f"rank{'s' if len(ranks) > 1 else ''} {shown}" if ranks else ""
    before, after = ("–" if one is None else printable(in_words(one, worst.unit)) for one in (worst.a, worst.b))
    number, _, size = after.partition(" ")
    before = before.removesuffix(f" {size}") if number and size else before
    return FigureLine(
        cell=cell_text(worst.cell, worst.versus),
        figure=" ".join(filter(None, (_metric(worst), whose))),
        amounts=f"{before} → {after}",
        change=_shift(worst.change, worst.change_unit),
        interval=_interval([worst]),
        verdict=worst.verdict,
    )


def _unclear(changes: Sequence[FigureChange]) -> Iterator[FigureLine]:
    """Yield one line for all figures without a verdict: their reasons are listed below the table."""
    if len(changes) == 1:
        yield _moved(changes)
    elif changes:
        cells = counted(len({(change.cell, change.versus) for change in changes}), "cell")
        figures = listed(dict.fromkeys(map(_metric, changes)))
        name = f"inconclusive in {cells}"
        yield FigureLine(name, figures, "", "", "", FigureVerdict.INCONCLUSIVE)


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
    kinds, verdicts = comparison.kinds(), comparison.verdicts()
    cells = [f"{kinds[kind]} {kind.value}" for kind in OutcomeKind if kinds[kind]]
    parts = [f"cells: {', '.join([*cells, f'{comparison.as_before} as before'])}"]
    if verdicts:
        counts = (f"{verdicts[verdict]} {verdict.value}" for verdict in FigureVerdict if verdicts[verdict])
        parts.append(f"figures: {', '.join(counts)}")
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
    lines = []
    for (verdict, reason), changes in sorted(found.items(), key=lambda group: -len(group[1])):
        needed = sorted(change.enough for change in changes if change.enough)
        more = ""
        if needed:
            numbers = str(needed[0]) if needed[0] == needed[-1] else f"{needed[0]:,} to {needed[-1]:,}"
            more = f" (at this noise, about {numbers} launches per side would decide)"
        lines.append(printable(f"{verdict.value}, {counted(len(changes), 'figure')}: {reason}{more}"))
    return lines if len(lines) <= most else [*lines[: most - 1], f"… and {len(lines) - most + 1} more reasons"]


SCHEMA_VERSION: Final = 1
NARROWEST: Final = 100
MOST_TERMINAL_LINES: Final = 40
MOST_TERMINAL_REASONS: Final = 8
MOST_MARKDOWN_LINES: Final = 200
MOST_MARKDOWN_REASONS: Final = 20
_COLOURS = {FigureVerdict.WORSE: "bold red", FigureVerdict.BETTER: "green", FigureVerdict.SAME: "dim"}
_OUTCOME_COLUMNS: Final = ("Outcome", "Cell", "A", "B")


def as_text(comparison: Comparison, width: int = NARROWEST, *, colour: bool = False) -> str:
    """Return the comparison for a terminal, in lines of at most ``width``; every figure fits into 100 characters."""
    return rendered(*_parts(comparison), width=width, colour=colour)


def as_markdown(comparison: Comparison) -> str:
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
    """Return the comparison as one object. ``gates`` names those that caught something. A missing number is null."""
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


FORMATS: Final[Mapping[str, Callable[[Comparison, Sequence[str], int], str]]] = {
    "text": lambda comparison, gates, exit_code: as_text(
        comparison, max(NARROWEST, shutil.get_terminal_size((NARROWEST, 24)).columns), colour=sys.stdout.isatty()
    ),
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
