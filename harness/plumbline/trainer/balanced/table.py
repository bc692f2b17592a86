"""A plan as lines of text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plumbline.drawing.timeline import duration

if TYPE_CHECKING:
    from plumbline.trainer.balanced.stages import Prediction, StagePlan

WIDTH = 100
NAMES = 2  # the column of the blocks' names
HEADERS = ("stage", "blocks", "time", "of slowest", "peak memory")


def table(plan: StagePlan, measured: Prediction | None = None) -> str:
    """Return a headline and a row a stage; ``measured`` adds what was measured beside what is predicted."""
    predicted = plan.predicted
    slowest = max(predicted.stage_seconds) or 1.0
    headers = list(HEADERS)
    if plan.memory is not None:
        headers.append("allowed")
    if measured is not None:
        headers += ["measured", "peak"] if measured.stage_peak_bytes else ["measured"]
    rows = []
    for number, stage in enumerate(plan.stages):
        seconds = predicted.stage_seconds[number]
        row = [
            str(number),
            str(stage.last - stage.first),
            duration(seconds),
            f"{seconds / slowest:.0%}",
            size(predicted.stage_peak_bytes[number]),
        ]
        if plan.memory is not None:
            row.append(size(plan.memory[number]))
        if measured is not None:
            row.append(duration(measured.stage_seconds[number]))
            row += map(size, measured.stage_peak_bytes[number : number + 1])
        rows.append(row)
    # The names of blocks get what the other columns leave.
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    room = WIDTH - sum(widths) - 2 * len(widths)
    names = [span([block.name for block in plan.blocks[stage.first : stage.last]], room) for stage in plan.stages]
    headers.insert(2, "")
    widths.insert(2, max(map(len, names)))
    for row, name in zip(rows, names, strict=True):
        row.insert(2, name)
    lines = [headline(plan, measured), "", _line(headers, widths), *(_line(row, widths) for row in rows)]
    return "\n".join(lines) + "\n"


def headline(plan: StagePlan, measured: Prediction | None = None) -> str:
    """Return how the batch passes, and what a step is expected to take."""
    predicted = plan.predicted
    replicas = "" if plan.replicas == 1 else f"{count(plan.replicas, 'replica')} of "
    line = (
        f"{replicas}{count(len(plan.stages), 'stage')}, {count(plan.micro_batches, 'micro-batch')}: "
        f"{duration(predicted.step_seconds)} a step, {predicted.bubble_share:.0%} bubble"
    )
    if measured is not None:
        line += f"; measured {duration(measured.step_seconds)}, {measured.bubble_share:.0%} bubble"
    return line


def count(number: int, thing: str) -> str:
    """Return the number and the thing, in the plural where it is due."""
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def size(number: int) -> str:
    """Return bytes with three digits and a unit; a MB is 10⁶ bytes."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 999.5 * scale else f"{number / scale:.0f} {unit}"
    return f"{number} B"


def span(names: Sequence[str], room: int) -> str:
    """Return the first and the last of the names, shortened in the middle to fit into ``room`` columns."""
    if len(names) == 1 or names[0] == names[-1]:
        return shortened(names[0], room)
    each = (room - 3) // 2
    return f"{shortened(names[0], each)} … {shortened(names[-1], each)}"


def shortened(name: str, room: int) -> str:
    """Return the name, its middle left out where it is longer than ``room``."""
    if len(name) <= room:
        return name
    head = max(0, room - 1) // 2
    tail = max(0, room - 1 - head)
    return f"{name[:head]}…{name[len(name) - tail :]}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line: names to the left, numbers to the right."""
    padded = (
        cell.ljust(width) if place == NAMES else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
