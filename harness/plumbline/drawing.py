"""A pipeline step as an SVG: a row per stage or rank, a box per forward or backward pass, and the time in between.

It can be read without colours: forward passes are plain, backward passes are hatched, gradients of weights are hatched
the other way, and boxes that are wide enough are labelled. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

KINDS: Final = {"forward": "forward of a micro-batch", "backward": "backward", "weights": "gradients of weights alone"}
"""The kinds of boxes, and what the legend calls them."""

WIDTH, MARGIN, LABEL, ROW, GAP, TOP = 960, 16, 190, 30, 10, 64
LETTER = 5.6  # pixels of a character at 9 px, rounded up

# Printed pages are light, whatever the screen is.
_STYLE = """
.timeline { --ink: #222; --paper: #fff; --line: #888; --soft: #555; --wait: #e4e8ec; --on: #241a08;
  --f: #2f6296; --on-f: #fff; --b: #f3b577; --b-line: #b5671d; --w: #a9d5b4; --w-line: #3c7d4d; }
@media screen and (prefers-color-scheme: dark) {
  .timeline { --ink: #e6e8eb; --paper: #1b1f25; --line: #7d8794; --soft: #aab3be; --wait: #323a44; --on: #fff;
    --f: #7db4e6; --on-f: #10171f; --b: #8a5218; --b-line: #f6c48e; --w: #2c613c; --w-line: #a5dbb3; }
}
.timeline text { fill: var(--ink); }
.timeline .scale text { fill: var(--soft); } .timeline .scale line { stroke: var(--line); }
.timeline .paper { fill: var(--paper); } .timeline .wait { fill: var(--wait); }
.timeline .box { stroke: var(--paper); stroke-width: .7; } .timeline rect.forward { fill: var(--f); }
.timeline pattern .backward { fill: var(--b); stroke: var(--b-line); }
.timeline pattern .weights { fill: var(--w); stroke: var(--w-line); }
.timeline pattern rect { stroke-width: 0; }
.timeline .micro { font-size: 9px; text-anchor: middle; fill: var(--on); paint-order: stroke; stroke-width: 3px; }
.timeline .micro.forward { fill: var(--on-f); }
.timeline .micro.backward { stroke: var(--b); } .timeline .micro.weights { stroke: var(--w); }
"""


@dataclass(frozen=True)
class Box:
    """A piece of work in a row, of one of ``KINDS``, from ``begin`` to ``end`` in seconds from the step's beginning.

    ``text`` is written into the box if there is room, ``title`` is its tooltip.
    """

    row: int
    kind: str
    text: str
    begin: float
    end: float
    title: str = ""


def timeline(title: str, rows: Sequence[str], boxes: Sequence[Box]) -> str:
    """Return the SVG of a step, as long as its last box; ``rows`` are a few words each."""
    span = max((box.end for box in boxes), default=0.0)
    scale = (WIDTH - 2 * MARGIN - LABEL) / (span or 1.0)
    height = TOP + len(rows) * (ROW + GAP) + 40
    # Patterns are referenced by ids, which must be unique on a page with several pictures.
    own = f"t{zlib.crc32(repr((title, boxes)).encode()):08x}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'class="timeline" font-family="system-ui, sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        *_patterns(own),
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="{MARGIN}" y="24" font-size="14" font-weight="600">{escape(title)}</text>',
        *_legend(own, boxes),
    ]
    for number, label in enumerate(rows):
        top = TOP + number * (ROW + GAP)
        lines += [
            f'<text x="{MARGIN}" y="{top + 19}">{escape(label)}</text>',
            f'<rect class="wait" x="{MARGIN + LABEL}" y="{top}" width="{WIDTH - 2 * MARGIN - LABEL}" height="{ROW}"/>',
        ]
    for box in boxes:
        lines += _box(own, box, scale)
    lines += _axis(span, scale, height - 22)
    return "\n".join([*lines, "</svg>"]) + "\n"


def duration(seconds: float) -> str:
    """Return seconds with three digits and a unit."""
    if not seconds:
        return "0"
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def _patterns(own: str) -> Iterator[str]:
    for kind, angle in (("backward", 45), ("weights", -45)):
        yield (
            f'<pattern id="{own}-{kind}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({angle})"><rect class="{kind}" width="6" height="6"/>'
            f'<path class="{kind}" d="M0 0V6" stroke-width="2"/></pattern>'
        )


def _fill(own: str, kind: str) -> str:
    return 'class="box forward"' if kind == "forward" else f'class="box" fill="url(#{own}-{kind})"'


def _legend(own: str, boxes: Sequence[Box]) -> Iterator[str]:
    x = MARGIN + LABEL
    used = {box.kind for box in boxes}
    shown = [(_fill(own, kind), words) for kind, words in KINDS.items() if kind in used]
    for fill, words in (*shown, ('class="wait"', "waiting (the bubble)")):
        yield f'<rect x="{x}" y="38" width="14" height="12" {fill}/><text x="{x + 19}" y="48">{words}</text>'
        x += 40 + 6 * len(words)


def _box(own: str, box: Box, scale: float) -> Iterator[str]:
    left, width = MARGIN + LABEL + box.begin * scale, (box.end - box.begin) * scale
    top = TOP + box.row * (ROW + GAP)
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    yield f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" {_fill(own, box.kind)}>{title}</rect>'
    if width > LETTER * len(box.text) + 2:
        yield f'<text class="micro {box.kind}" x="{left + width / 2:.2f}" y="{top + 18}">{escape(box.text)}</text>'


def _axis(span: float, scale: float, top: float) -> Iterator[str]:
    left = MARGIN + LABEL
    yield f'<g class="scale"><line x1="{left}" y1="{top - 14}" x2="{WIDTH - MARGIN}" y2="{top - 14}"/>'
    for part in range(5):
        seconds = span * part / 4
        x, anchor = left + seconds * scale, ("start", "middle", "middle", "middle", "end")[part]
        yield f'<line x1="{x:.2f}" y1="{top - 14}" x2="{x:.2f}" y2="{top - 10}"/>'
        yield f'<text x="{x:.2f}" y="{top + 3}" text-anchor="{anchor}">{duration(seconds)}</text>'
    yield "</g>"
