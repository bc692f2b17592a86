"""The support table and the speed table that pytest prints at the end of a run, drawn by rich."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from typing import Final

import pandas as pd
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from plumbline.core.numbers import compact, counted
from plumbline.report.tables import run_summary
from plumbline.report.tables.cells import cell_table, counts_in_words, undeclared_in_words, unsupported
from plumbline.report.tables.failures import as_sentence, mistakes, subject_causes
from plumbline.report.tables.measured import EFFICIENCY, MEMORY, has_several_subjects, measured_cells
from plumbline.report.tables.support import IN_A_WORD, ROW_COLUMNS, mark_columns, side_by_side, support_table
from plumbline.report.text import in_words, printable
from plumbline.results.records import Measurement
from plumbline.results.run import Run


def plain_table(*, expand: bool = False, gap: int = 1) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, expand=expand)


def rendered(*parts: RenderableType, width: int, colour: bool) -> str:
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


MOST_ROWS: Final = 40
MOST_MISTAKES: Final = 6  # per subject
_RATE = "samples/s"
_SPEED_COLUMNS: Final = {_RATE: ("throughput",), "Scaling": EFFICIENCY, "Step": ("step_p50",), "Memory": MEMORY}
_SPEED_LEGEND = "~~struck through~~: this run found the configuration wrong, so its speed does not count"
# Headings on two lines, so that a column is little wider than its mark.
_HEADS = {"1 GPU": "1\nGPU", "1+ GPUs": "1+\nGPUs", "16-bit": "16-\nbit"}
_COLOURS = {"Y": "green", "C": "cyan", "K": "yellow", "N": "bold red", "X": "bold red", "?": "yellow", "-": "dim"}
_LEGEND = {**IN_A_WORD, "K": "known: failed as expected", "X": "unexpected pass: should have failed and did not"}


def support_for_terminal(
    run: Run, width: int = 100, *, colour: bool = False, every: bool = False, counted: bool = True
) -> str:
    """Return the support table, its legend, and the number of cells by outcome, in lines of at most ``width``.

    If there are several subjects, each has a column. Rows without a declared cell are left out, unless ``every``. With
    ``counted``, a line says how many cells are not declared.
    """
    together = side_by_side(run, every=every)
    table = _support(_rows(run, every=every)) if together is None else _columns(together)
    closing = _closing_lines(run, every=every, undeclared=counted)
    return rendered(table, *closing, width=width, colour=colour)


def _columns(together: pd.DataFrame) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    for name in together.columns[len(ROW_COLUMNS) :]:
        table.add_column(printable(name).replace("-", "-\n"), overflow="fold")
    for row in together.itertuples(index=False):
        named, squares = map(str, row[: len(ROW_COLUMNS)]), map(str, row[len(ROW_COLUMNS) :])
        table.add_row(printable(" ".join(named)), *(Text(text, style=_COLOURS.get(text[:1], "")) for text in squares))
    return table


def _rows(run: Run, *, every: bool) -> pd.DataFrame:
    support = support_table(run, every=True)
    return support if every else support[~(support[_marked(support)] == "-").any(axis=1)]


def _marked(support: pd.DataFrame) -> list[str]:
    """Return the columns that have a mark in at least one row."""
    return [name for name in mark_columns() if name in support and (support[name] != "").any()]


def _support(support: pd.DataFrame) -> Table:
    marks = _marked(support)
    table = plain_table(expand=True, gap=0)
    for name in marks:
        table.add_column(_HEADS.get(name, name), justify="center", no_wrap=True)
    table.add_column("Command", ratio=1, overflow="fold")
    table.add_column("Cells\npassed", justify="right", no_wrap=True)
    table.add_column("Devi-\nates", justify="right", no_wrap=True)
    table.add_column("Worst\n× noise", justify="right", no_wrap=True)
    for row in support.to_dict("records"):
        table.add_row(
            *(Text(row[name], style=_COLOURS.get(row[name], "")) for name in marks),
            Text(re.sub(r"^Trainer\((.*)\)$", r"\1", printable(row["Command"])).replace("distributed_backend=", "…=")),
            Text(row["Cells passed"].partition(" ")[0]),
            Text(str(row["Deviates"] or "")),
            Text(compact(row["Worst × noise"])),
        )
    return table


def _closing_lines(run: Run, *, every: bool, undeclared: bool) -> list[Text]:
    cells = cell_table(run)
    used = set(cells["mark"]) - (set() if every else {"-"})
    lines = [
        Text("  ".join(f"{mark} {words}" for mark, words in _LEGEND.items() if mark in used)),
        Text(f"{counts_in_words(cells['outcome'])}. Devices: {', '.join(run_summary.computed_by(run)) or 'none'}."),
    ]
    lines += [Text(f"{sentence}.") for sentence in run_summary.micro_batches_in_words(run)]
    lines += [Text(note, style="yellow") for note in run_summary.notes(run)]
    lines += _mistakes(run)
    if undeclared and (some := unsupported(run, cells)):
        lines.append(Text(printable(f"{undeclared_in_words(some)}.")))
    if missing := run_summary.what_is_missing(run, cells):
        lines.append(Text(missing, style="bold red"))
    return lines


def _mistakes(run: Run) -> Iterator[Text]:
    for subject, groups in mistakes(run).items():
        yield Text(f"{counted(len(groups), 'mistake')} in {printable(subject)}:", style="bold red")
        for group in groups[:MOST_MISTAKES]:
            named = f"{group.title} ({group.family})" if group.family else group.title
            told = f"in {counted(len(group.findings), 'cell')}: {as_sentence(group.findings[0])}"
            yield Text(printable(f"- {named}, {told}"))
        if len(groups) > MOST_MISTAKES:
            yield Text(f"- and {len(groups) - MOST_MISTAKES} more, in report.html")
    for summary in subject_causes(run):
        if summary.doubt:
            yield Text(printable(summary.doubt))


def speed_for_terminal(run: Run, width: int = 100, *, colour: bool = False) -> str:
    """Return one line of main figures per measured cell, at most ``width`` wide; "" without measurements."""
    cells = measured_cells(run)
    if not cells:
        return ""
    several = has_several_subjects(cells)
    table = plain_table(expand=True)
    table.add_column("Workload", no_wrap=True, overflow="ellipsis")
    table.add_column("Configuration", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in _SPEED_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Conformance", no_wrap=True, overflow="ellipsis")
    for cell in cells[:MOST_ROWS]:
        wrong = cell.conformance.wrong
        table.add_row(
            Text(printable(cell.at.workload)),
            Text(printable(cell.configuration(several_subjects=several))),
            *(_figure(cell.first(metrics), wrong) for metrics in _SPEED_COLUMNS.values()),
            Text(IN_A_WORD.get(cell.conformance.mark, cell.conformance.mark), style="bold red" if wrong else ""),
        )
    lines = [Text(_SPEED_LEGEND)] if any(cell.conformance.wrong for cell in cells) else []
    if len(cells) > MOST_ROWS:
        lines.append(Text(f"… and {len(cells) - MOST_ROWS} more, in report.html"))
    if run_summary.SIMULATED in run_summary.computed_by(run):
        lines.append(Text(run_summary.NOT_ABOUT_GPUS))
    return rendered(table, *lines, width=width, colour=colour)


def _figure(figure: Measurement | None, wrong: bool) -> Text:
    if figure is None:
        return Text("")
    if figure.value is None:
        return Text("no figure", style="dim")
    shown = in_words(figure.value, figure.unit).removesuffix(f" {_RATE}")
    return Text(printable(f"~~{shown}~~" if wrong else shown), style="strike dim" if wrong else "")
