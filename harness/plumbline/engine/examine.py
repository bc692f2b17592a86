"""Takes one cell from launch to findings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.evidence.trace import Trace
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import CellLaunch, Settings, behavior_of, start, with_interruption
from plumbline.launch.pool import Pool
from plumbline.launch.this_machine import devices_of
from plumbline.machine.lease import shared_lease
from plumbline.own_workloads.load import workload_of


@dataclass(frozen=True)
class Examined:
    """The findings of one cell, and the wall time of its launch in seconds (None if the launch failed)."""

    findings: tuple[Finding, ...]
    seconds: float | None


def examine(pool: Pool, cell: Cell, folder: Path, settings: Settings) -> Examined:
    """Train ``cell`` with ranks from ``pool``, write the trace to ``folder``, and judge it.

    If the machine or the cell's devices are in use, wait for them.
    """
    try:
        with shared_lease(devices_of(cell, settings.oversubscribe), share_devices=settings.oversubscribe):
            trace = trace_of(start(pool, cell, folder, settings), cell)
            return verdict(trace, cell, behavior_of(pool, cell))
    except TraceError as error:
        return unreadable(error)
    except LaunchError as error:
        return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)


def trace_of(launched: CellLaunch, cell: Cell) -> Trace:
    """Wait for a launch of ``cell`` and return its trace.

    A workload with an interruption needs two more launches.

    Raises:
        LaunchError: the harness could not launch the ranks, or lost them.
        TraceError: the evidence cannot be read.
    """
    workload = workload_of(cell)
    trace = launched.wait_for_trace()
    if workload.interrupt_after is None:
        return trace
    return with_interruption(trace, launched, cell, workload.interrupt_after, elastic=workload.elastic)


def verdict(trace: Trace, cell: Cell, behavior: TrainingBehavior) -> Examined:
    return Examined(judge(TraceAnalysis(trace, workload_of(cell), cell, behavior)), trace.seconds)


def unreadable(error: TraceError) -> Examined:
    """Return the finding of a cell whose evidence cannot be read."""
    return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)
