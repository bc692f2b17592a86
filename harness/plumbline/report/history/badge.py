"""A badge for a README: how the newest run of a subject ended, as a small SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from plumbline.report.history.cell_history import CellHistory, is_examined
from plumbline.report.text import counted, printable
from plumbline.results.records import KNOWN

GOOD, BAD, UNCLEAR = "#00664b", "#a83f00", "#5b6370"
"""Each has a contrast of at least 4.5 with white."""

_LABEL: Final = "#30363d"
_WIDTH: Final = 6.6
"""Pixels of a character at 11 pixels; ``textLength`` fits the text to what was reckoned."""


def badge_of(cells: Sequence[CellHistory]) -> str:
    examined = [cell for cell in cells if is_examined(cell)]
    wrong = sum(cell.now.end.wrong for cell in examined)
    known = sum(cell.now.end.outcome == KNOWN for cell in examined)
    if wrong:
        return badge("plumbline", f"{wrong} of {counted(len(examined), 'cell')} wrong", BAD)
    if not examined:
        return badge("plumbline", "nothing examined", UNCLEAR)
    right = f"{counted(len(examined) - known, 'cell')} right"
    return badge("plumbline", f"{right}, {counted(known, 'known failure')}" if known else right, GOOD)


def badge(label: str, value: str, colour: str) -> str:
    """Return an SVG with two fields; its title has both texts, for screen readers."""
    widths = [round(len(text) * _WIDTH) + 12 for text in (label, value)]
    title = f"{printable(label)}: {printable(value)}"
    texts = "".join(
        f'<text x="{sum(widths[:place]) + width / 2}" y="14" textLength="{width - 12}">{escape(printable(text))}</text>'
        for place, (text, width) in enumerate(zip((label, value), widths, strict=True))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" '
        f"aria-label={quoteattr(title)}><title>{escape(title)}</title>"
        f'<clipPath id="round"><rect width="{sum(widths)}" height="20" rx="3"/></clipPath><g clip-path="url(#round)">'
        f'<rect width="{widths[0]}" height="20" fill="{_LABEL}"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )
