"""Skipped steps under a schedule: the learning rate waits for the weights."""

from __future__ import annotations

from harness.workloads.overflow import Overflow
from harness.workloads.schedule import Schedule


class OverflowSchedule(Overflow, Schedule):
    """Planned overflows with momentum and a learning rate that is another one after every step taken."""

    name = "overflow-schedule"
    exposes = "a schedule, or a momentum, that goes on at a step which was skipped"
    precisions = ("16",)
