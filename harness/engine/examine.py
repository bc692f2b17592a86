"""One cell, from launch to findings. What the pytest plugin calls, and all that it needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.core.cell import Cell
from harness.core.errors import LaunchError, TraceError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.judge import judge
from harness.launch.interruption import with_interruption
from harness.launch.local.devices import devices_of
from harness.launch.local.launcher import Launched, behavior_of, start
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.machine.lease import share
from harness.workloads import find


@dataclass(frozen=True)
class Examined:
    """The findings of one cell, and the wall time of its launch in seconds (None if it could not be launched)."""

    findings: tuple[Finding, ...]
    seconds: float | None


def examine(pool: Pool, cell: Cell, folder: Path, settings: Settings) -> Examined:
    """Train ``cell`` with ranks from ``pool``, leave the evidence in ``folder``, and judge it.

    Where a cell is being measured on this machine, or its devices are in use, that comes first.
    """
    try:
        with share(devices_of(cell, settings.oversubscribe), together=settings.oversubscribe):
            return verdict(start(pool, cell, folder, settings), cell)
    except LaunchError as error:
        return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)


def verdict(launched: Launched, cell: Cell, meanwhile: Callable[[], None] = lambda: None) -> Examined:
    """Wait for a launch of ``cell`` and judge it; ``meanwhile`` is called when the ranks are done.

    Where the workload asks for an interruption, two more launches follow.

    Raises:
        LaunchError: the harness could not go through with it.
    """
    workload = find(cell.workload, cell.seed)
    try:
        trace = launched.trace()
        if workload.interrupt_after is not None:
            trace = with_interruption(trace, launched, cell, workload.interrupt_after, elastic=workload.elastic)
    except TraceError as error:
        return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)
    meanwhile()
    return Examined(judge(trace, workload, cell, behavior_of(launched.pool, cell)), trace.seconds)
