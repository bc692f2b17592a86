"""One cell, from launch to findings. What the pytest plugin calls, and all that it needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.core.cell import Cell
from harness.core.errors import LaunchError, TraceError
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.judge import judge
from harness.launch.local import launch
from harness.launch.pool import Pool
from harness.workloads import WORKLOADS


@dataclass(frozen=True)
class Examined:
    """The findings of one cell, and the wall time of its launch in seconds (None if it could not be launched)."""

    findings: tuple[Finding, ...]
    seconds: float | None


def examine(pool: Pool, cell: Cell, folder: Path, *, time_limit: float, oversubscribe: bool) -> Examined:
    """Train ``cell`` with ranks from ``pool``, leave the evidence in ``folder``, and judge it."""
    try:
        trace = launch(pool, cell, folder, time_limit=time_limit, oversubscribe=oversubscribe)
    except (LaunchError, TraceError) as error:
        return Examined((Finding("launch", Outcome.ERRORED, str(error)),), None)
    return Examined(judge(trace, WORKLOADS[cell.workload], cell), trace.seconds)
