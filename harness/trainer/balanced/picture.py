"""A schedule as an SVG: a row a stage, a box a forward or backward, and the time in which a stage waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from harness.trainer.balanced.schedule import BACKWARD, FORWARD, Box, StageSchedule
from harness.trainer.balanced.table import duration

WIDTH, MARGIN, LABEL, ROW, GAP, TOP = 960, 16, 190, 30, 10, 64
FILL = {FORWARD: "#3f6fa3", BACKWARD: "#f0a860"}
INK = {FORWARD: "#ffffff", BACKWARD: "#3a2a12"}
WAITING = "#eceff2"
DIGIT = 5.6  # pixels of a digit at 9 px, rounded up


def picture(schedule: StageSchedule, title: str, labels: Sequence[str]) -> str:
    """Return the SVG.

    Args:
        schedule: What is drawn.
        title: One line.
        labels: Of each stage, a few words each.

    """
    height = TOP + schedule.stages * (ROW + GAP) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="24" font-size="14" font-weight="600">{escape(title)}</text>',
        *_legend(),
    ]
    scale = (WIDTH - 2 * MARGIN - LABEL) / (schedule.makespan or 1.0)
    for stage, label in enumerate(labels):
        top = TOP + stage * (ROW + GAP)
        lines += [
            f'<text x="{MARGIN}" y="{top + 19}">{escape(label)}</text>',
            f'<rect x="{MARGIN + LABEL}" y="{top}" width="{WIDTH - 2 * MARGIN - LABEL}" height="{ROW}" '
            f'fill="{WAITING}"/>',
        ]
    for box in schedule.boxes:
        lines += _box(box, scale)
    lines += _axis(schedule, scale, height - 22)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = MARGIN + LABEL
    for fill, words in (
        (FILL[FORWARD], "forward of a micro-batch"),
        (FILL[BACKWARD], "backward"),
        (WAITING, "waiting (the bubble)"),
    ):
        yield f'<rect x="{x}" y="38" width="12" height="12" fill="{fill}" stroke="#b8bec6" stroke-width="0.5"/>'
        yield f'<text x="{x + 17}" y="48">{words}</text>'
        x += 38 + 6 * len(words)


def _box(box: Box, scale: float) -> Iterator[str]:
    left, width = MARGIN + LABEL + box.start * scale, (box.end - box.start) * scale
    top = TOP + box.stage * (ROW + GAP)
    number = str(box.micro_batch)
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{FILL[box.kind]}" stroke="#fff" '
        'stroke-width="0.7"/>'
    )
    if width > DIGIT * len(number) + 2:
        yield (
            f'<text x="{left + width / 2:.2f}" y="{top + 18}" font-size="9" text-anchor="middle" '
            f'fill="{INK[box.kind]}">{number}</text>'
        )


def _axis(schedule: StageSchedule, scale: float, top: float) -> Iterator[str]:
    left = MARGIN + LABEL
    yield f'<line x1="{left}" y1="{top - 14}" x2="{WIDTH - MARGIN}" y2="{top - 14}" stroke="#888"/>'
    for part in range(5):
        seconds = schedule.makespan * part / 4
        x, anchor = left + seconds * scale, ("start", "middle", "middle", "middle", "end")[part]
        yield f'<line x1="{x:.2f}" y1="{top - 14}" x2="{x:.2f}" y2="{top - 10}" stroke="#888"/>'
        yield f'<text x="{x:.2f}" y="{top + 3}" text-anchor="{anchor}" fill="#555">{duration(seconds)}</text>'
