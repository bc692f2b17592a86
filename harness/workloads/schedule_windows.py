"""A schedule under accumulation: it counts optimizer steps, not micro-batches."""

from __future__ import annotations

from typing import ClassVar

from harness.workloads.schedule import Schedule


class ScheduleWindows(Schedule):
    """The schedule with windows of two, two and one micro-batches."""

    name = "schedule-windows"
    exposes = "a schedule stepped for every micro-batch: the rate decays a window's length too fast"
    needs: ClassVar[frozenset[str]] = frozenset({"scheduler", "accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 5
