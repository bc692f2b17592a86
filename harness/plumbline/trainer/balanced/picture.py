"""A planned schedule as a picture: a row a stage, its boxes labelled with micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from plumbline.drawing.timeline import Box, timeline
from plumbline.trainer.balanced.schedule import BACKWARD, FORWARD, StageSchedule

KINDS = {FORWARD: "forward", BACKWARD: "backward"}


def picture(schedule: StageSchedule, title: str, labels: Sequence[str]) -> str:
    """Return the SVG.

    Args:
        schedule: What is drawn.
        title: One line.
        labels: Of each stage, a few words each.

    """
    boxes = [Box(box.stage, KINDS[box.kind], str(box.micro_batch), box.start, box.end) for box in schedule.boxes]
    return timeline(title, labels, boxes)
