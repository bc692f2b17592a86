"""SVG badges with a label and a value, for README files."""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape, quoteattr

from plumbline.report.text import printable

GOOD, BAD, UNCLEAR = "#00664b", "#a83f00", "#5b6370"
"""Each has a contrast ratio of at least 4.5 to white."""

_LABEL: Final = "#30363d"
_WIDTH: Final = 6.6  # pixels per character at font size 11; ``textLength`` fits the text to the computed width


def badge(label: str, value: str, colour: str) -> str:
    widths = [round(len(text) * _WIDTH) + 12 for text in (label, value)]
    title = f"{printable(label)}: {printable(value)}"
    texts = "".join(
        f'<text x="{sum(widths[:index]) + width / 2}" y="14" textLength="{width - 12}">{escape(printable(text))}</text>'
        for index, (text, width) in enumerate(zip((label, value), widths, strict=True))
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


def verdict_badge(answer: str) -> str:
    """Return the badge for an answer of ``plumbline check``, such as ``right``."""
    return badge("plumbline", answer, {"right": GOOD, "wrong": BAD}.get(answer, UNCLEAR))
