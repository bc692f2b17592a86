"""What a terminal shows of a run: the support table at the end of pytest's output."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from harness.report.tables.cells import cell_table
from harness.report.tables.side_by_side import ROW_COLUMNS, side_by_side
from harness.report.tables.subject_causes import subject_causes
from harness.report.tables.summary import computed_by, counts_in_words, notes, what_is_missing
from harness.report.tables.support import IN_A_WORD, mark_columns, support_table
from harness.report.tables.undeclared import undeclared_in_words, unsupported
from harness.report.terminal.console import rendered
from harness.report.text import compact, printable
from harness.results.records import KNOWN, UNEXPECTED_PASS
from harness.results.run import Run

# Heads over two lines, so that a column is hardly wider than its mark.
_HEADS = {"1 GPU": "1\nGPU", "1+ GPUs": "1+\nGPUs", "16-bit": "16-\nbit"}
_COLOURS = {"Y": "green", "C": "cyan", "K": "yellow", "N": "bold red", "X": "bold red", "?": "yellow", "-": "dim"}
_LEGEND = "  ".join([*(f"{sign} {IN_A_WORD[sign]}" for sign in "YCN?-")])
_LEGEND_OF_EXPECTED = "K known: failed as expected  X unexpected pass: should have failed and did not"


def support_for_terminal(
    run: Run, width: int = 100, *, colour: bool = False, every: bool = False, counted: bool = True
) -> str:
    """Return the support table, what its signs mean, and how the cells ended, in lines of at most ``width``.

    Several subjects stand side by side; what each row would be called is left to support.md.
    Rows of which no cell is declared are left out unless ``every`` is to be there; where ``counted``, a line says how
    many cells are not declared.
    """
    together = side_by_side(run, every=every)
    table = _support(run, every=every) if together is None else _columns(together)
    closing = _closing_lines(run, several=together is not None, counted=counted)
    return rendered(table, *closing, width=width, colour=colour)


def _columns(together: pd.DataFrame) -> Table:
    """Return the table of ``side_by_side``, a row's name in one column: nine trainers fit into 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in together.columns[len(ROW_COLUMNS) :]:
        table.add_column(printable(name).replace("-", "-\n"), overflow="fold")
    for row in together.itertuples(index=False):
        named, squares = map(str, row[: len(ROW_COLUMNS)]), map(str, row[len(ROW_COLUMNS) :])
        table.add_row(printable(" ".join(named)), *(Text(text, style=_COLOURS.get(text[:1], "")) for text in squares))
    return table


def _support(run: Run, *, every: bool) -> Table:
    """Return one subject's table.

    100 columns hold the reference trainer's rows whole; below that the commands lose their ends. The call is
    shortened to its arguments, and cells not tried are left to the counts below the table and to support.md.
    """
    support = support_table(run, every=True)
    marks = [name for name in mark_columns() if name in support]
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=0, pad_edge=False, show_edge=False)
    for name in marks:
        table.add_column(_HEADS.get(name, name), justify="center", no_wrap=True)
    table.add_column("Command", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("Cells\npassed", justify="right", no_wrap=True)
    table.add_column("Devi-\nates", justify="right", no_wrap=True)
    table.add_column("Worst\n× noise", justify="right", no_wrap=True)
    for row in support.to_dict("records"):
        if not every and _is_undeclared(row):
            continue
        table.add_row(
            *(Text(row[name], style=_COLOURS.get(row[name], "")) for name in marks),
            Text(_arguments(printable(row["Command"]))),
            Text(row["Cells passed"].partition(" ")[0]),
            Text(str(row["Deviates"] or "")),
            Text(compact(row["Worst × noise"])),
        )
    return table


def _is_undeclared(row: Mapping[Hashable, Any]) -> bool:
    return any(row[name] == "-" for name in mark_columns() if name in row)


def _arguments(command: str) -> str:
    """Return the arguments of a ``Trainer(…)`` call, without the longest of the keywords."""
    if command.startswith("Trainer(") and command.endswith(")"):
        command = command.removeprefix("Trainer(").removesuffix(")")
    return command.replace("distributed_backend=", "…=")


def _closing_lines(run: Run, *, several: bool, counted: bool) -> list[Text]:
    cells = cell_table(run)
    lines = [
        Text(_LEGEND if several else f"{_LEGEND}  … distributed_backend"),
        Text(f"{counts_in_words(cells['outcome'])}. Devices: {', '.join(computed_by(run)) or 'none'}."),
    ]
    if {KNOWN, UNEXPECTED_PASS} & set(cells["outcome"]):
        lines.insert(1, Text(_LEGEND_OF_EXPECTED))
    lines += [Text(note, style="yellow") for note in notes(run)]
    for summary in subject_causes(run):
        lines += [Text(printable(sentence)) for sentence in summary.sentences]
    if counted and (undeclared := unsupported(run, cells)):
        lines.append(Text(printable(f"{undeclared_in_words(undeclared)}.")))
    if missing := what_is_missing(run, cells):
        lines.append(Text(missing, style="bold red"))
    return lines
