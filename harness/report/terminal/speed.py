"""The speed table for a terminal: one line a measured cell."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from harness.report.html.charts import configuration_of
from harness.report.html.scales import in_words
from harness.report.tables.figures import EFFICIENCY, MEMORY, measured_cells
from harness.report.tables.summary import SIMULATED, computed_by
from harness.report.tables.support import IN_A_WORD
from harness.report.terminal.console import rendered
from harness.report.text import printable
from harness.results.records import Measurement
from harness.results.run import Run

MOST_ROWS = 40
_RATE = "samples/s"
_COLUMNS: Final = {_RATE: ("throughput",), "Scaling": EFFICIENCY, "Step": ("step_p50",), "Memory": MEMORY}
_LEGEND = "~~so~~: the same run found the configuration wrong; fast and wrong is not supported"


def speed_for_terminal(run: Run, width: int = 100, *, colour: bool = False) -> str:
    """Return the figures that matter most in lines of at most ``width``; nothing where nothing was measured."""
    cells = measured_cells(run)
    if not cells:
        return ""
    several = len({cell.subject for cell in cells}) > 1
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("Workload", no_wrap=True, overflow="ellipsis")
    table.add_column("Configuration", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Conformance", no_wrap=True, overflow="ellipsis")
    for cell in cells[:MOST_ROWS]:
        wrong = cell.conformance.wrong
        table.add_row(
            Text(printable(cell.workload)),
            Text(printable(configuration_of(cell, several))),
            *(_figure(cell.first(metrics), wrong) for metrics in _COLUMNS.values()),
            Text(IN_A_WORD.get(cell.conformance.mark, cell.conformance.mark), style="bold red" if wrong else ""),
        )
    lines = [Text(_LEGEND)] if any(cell.conformance.wrong for cell in cells) else []
    if len(cells) > MOST_ROWS:
        lines.append(Text(f"… and {len(cells) - MOST_ROWS} more, in report.html"))
    if SIMULATED in computed_by(run):
        lines.append(Text("Devices: simulated. None of these figures is about GPUs."))
    return rendered(table, *lines, width=width, colour=colour)


def _figure(figure: Measurement | None, wrong: bool) -> Text:
    if figure is None:
        return Text("")
    if figure.value is None:
        return Text("no figure", style="dim")
    said = in_words(figure.value, figure.unit).removesuffix(f" {_RATE}")
    return Text(printable(f"~~{said}~~" if wrong else said), style="strike dim" if wrong else "")
