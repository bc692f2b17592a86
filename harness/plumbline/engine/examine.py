"""Takes one cell from launch to findings."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.core.errors import LaunchError, TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.evidence.read import RESUMED, SAVED
from plumbline.evidence.trace import Trace
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import CellLaunch, CheckpointRequest, Settings, behavior_of, start
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
    except (LaunchError, TraceError) as error:
        return without_verdict(error)


def trace_of(launched: CellLaunch, cell: Cell) -> Trace:
    """Wait for a launch of ``cell`` and return its trace.

    A workload with an interruption needs two more launches: one stops after some optimizer steps and saves a
    checkpoint, another one resumes from it. An elastic training has a different number of devices before the
    interruption. If a trace is incomplete, there are no further launches.

    Raises:
        LaunchError: the harness could not launch the ranks, or lost them.
        TraceError: the evidence cannot be read.
    """
    workload = workload_of(cell)
    trace = launched.wait_for_trace()
    if workload.interrupt_after is None or not trace.is_whole:
        return trace
    # In the folder of the evidence, because every node can write there. It may contain code, so it is not kept.
    checkpoint = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=launched.folder))

    def again(trained: Cell, part: str, stop_after_step: int | None) -> Trace:
        request = CheckpointRequest(checkpoint, stop_after_step)
        return start(launched.pool, trained, launched.folder / part, launched.settings, request).wait_for_trace()

    try:
        saved = again(cell.resized if workload.elastic else cell, SAVED, workload.interrupt_after)
        resumed = again(cell, RESUMED, None) if saved.is_whole else None
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return replace(trace, saved=saved, resumed=resumed)


def verdict(trace: Trace, cell: Cell, behavior: TrainingBehavior) -> Examined:
    return Examined(judge(TraceAnalysis(trace, workload_of(cell), cell, behavior)), trace.seconds)


def without_verdict(error: LaunchError | TraceError) -> Examined:
    """Return the finding of a cell whose ranks or evidence are lost."""
    return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)
