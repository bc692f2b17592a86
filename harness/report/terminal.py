"""The support table at the end of pytest's output."""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.cells import cell_table
from harness.report.summary import counts_in_words, devices, what_is_missing
from harness.report.support import MARK_COLUMNS, support_table
from harness.report.text import compact, printable
from harness.store.records import KNOWN, UNEXPECTED_PASS
from harness.store.run import Run

# Heads over two lines, so that a column is hardly wider than its mark.
_HEADS = {"1 GPU": "1\nGPU", "1+ GPUs": "1+\nGPUs", "16-bit": "16-\nbit"}
_COLOURS = {"Y": "green", "C": "cyan", "K": "yellow", "N": "bold red", "X": "bold red", "?": "yellow", "-": "dim"}
_LEGEND = "Y passed  C as the contract says  N failed  ? no verdict  - unsupported  … distributed_backend"
_LEGEND_OF_EXPECTED = "K known: failed as expected  X unexpected pass: should have failed and did not"


def support_for_terminal(run: Run, width: int = 100, *, colour: bool = False) -> str:
    """Return the support table, what its signs mean, and how the cells ended, in lines of at most ``width``.

    100 columns hold the reference trainer's rows whole; below that the commands lose their ends. The call is
    shortened to its arguments, and cells not tried are left to the counts below the table and to support.md.
    """
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=0, pad_edge=False, show_edge=False)
    for name in MARK_COLUMNS:
        table.add_column(_HEADS.get(name, name), justify="center", no_wrap=True)
    table.add_column("Command", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("Cells\npassed", justify="right", no_wrap=True)
    table.add_column("Devi-\nates", justify="right", no_wrap=True)
    table.add_column("Worst\n× noise", justify="right", no_wrap=True)
    for row in support_table(run).to_dict("records"):
        table.add_row(
            *(Text(row[name], style=_COLOURS.get(row[name], "")) for name in MARK_COLUMNS),
            Text(_arguments(printable(row["Command"]))),
            Text(row["Cells passed"].partition(" ")[0]),
            Text(str(row["Deviates"] or "")),
            Text(compact(row["Worst × noise"])),
        )
    return _rendered(table, _closing_lines(run), width, colour)


def _arguments(command: str) -> str:
    """Return the arguments of a ``Trainer(…)`` call, without the longest of the keywords."""
    if command.startswith("Trainer(") and command.endswith(")"):
        command = command.removeprefix("Trainer(").removesuffix(")")
    return command.replace("distributed_backend=", "…=")


def _closing_lines(run: Run) -> list[Text]:
    cells = cell_table(run)
    computed_by = dict.fromkeys(devices(run, accelerator) for accelerator in cells["accelerator"])
    lines = [
        Text(_LEGEND),
        Text(f"{counts_in_words(cells)}. Devices: {', '.join(computed_by) or 'none'}."),
    ]
    if {KNOWN, UNEXPECTED_PASS} & set(cells["outcome"]):
        lines.insert(1, Text(_LEGEND_OF_EXPECTED))
    if missing := what_is_missing(run, cells):
        lines.append(Text(missing, style="bold red"))
    return lines


def _rendered(table: Table, lines: list[Text], width: int, colour: bool) -> str:
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
        console.print(table)
        for line in lines:
            console.print(line)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
