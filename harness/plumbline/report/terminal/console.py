"""What rich draws, as text: for a terminal of any width, in colour or without."""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table


def plain_table(*, expand: bool = False, gap: int = 1) -> Table:
    """Return an empty table with a line below its headings, and ``gap`` blanks between columns."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, expand=expand)


def rendered(*parts: RenderableType, width: int, colour: bool) -> str:
    """Return what rich makes of the parts, without blanks at the ends of lines."""
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
