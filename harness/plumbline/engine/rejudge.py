"""Judges a recorded run again from its traces, without training. The user gives their own workloads again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbline.core.cell import Cell
from plumbline.core.errors import TraceError
from plumbline.core.finding import in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.engine.examine import verdict
from plumbline.evidence.read import read_trace
from plumbline.own_workloads.load import OwnWorkload, use_workloads
from plumbline.results.files import trace_folder
from plumbline.results.header_footer import WorkloadSource
from plumbline.results.records import PlannedCell, Result
from plumbline.results.run import Run, line_of
from plumbline.workloads import WORKLOADS


@dataclass(frozen=True)
class Rejudged:
    """One cell of a run: its recorded findings, and the findings of the present judge on the same trace.

    ``obstacle`` says why the trace cannot be judged; None if it can.
    """

    cell: str
    recorded: tuple[Result, ...]
    now: tuple[Result, ...] = ()
    obstacle: str | None = None

    @property
    def same(self) -> bool:
        return [line_of(result) for result in self.now] == [line_of(result) for result in self.recorded]


def rejudge(run: Run, workloads: Sequence[str] = ()) -> list[Rejudged]:
    """Judge all cells of which the run kept the trace, in the order of the plan.

    Args:
        run: the recorded run.
        workloads: the user's own workloads, as given to ``--workload``.

    Raises:
        WorkloadError: one of ``workloads`` cannot be loaded.
    """
    import torch

    # As in the recorded session: the number of threads can change rounding.
    torch.set_num_threads(1)
    seed = run.header.options.get("seed")
    missing = use_recorded_workloads(run.header.workloads, workloads)
    return [
        _rejudge(planned, run, folder, seed if isinstance(seed, int) else None, missing.get(planned.workload))
        for planned in run.header.planned
        if (folder := trace_folder(run.path, planned.cell))
    ]


def _rejudge(planned: PlannedCell, run: Run, evidence: Path, seed: int | None, missing: str | None = None) -> Rejudged:
    recorded = tuple(result for result in run.results if result.coordinates == planned.coordinates)
    cell = Cell(
        planned.subject, planned.workload, planned.backend, Topology.parse(planned.topology), planned.precision,
        planned.accelerator, seed,
    )  # fmt: skip
    if missing is not None:
        return Rejudged(cell.id, recorded, obstacle=missing)
    if cell.workload not in WORKLOADS:
        return Rejudged(cell.id, recorded, obstacle=f"this version has no workload {cell.workload!r}")
    try:
        trace = read_trace(evidence)
    except TraceError as error:
        return Rejudged(cell.id, recorded, obstacle=str(error))
    reproduce, seconds = (recorded[0].reproduce, recorded[0].seconds) if recorded else ("", None)
    try:
        behavior = TrainingBehavior.of(planned.conduct)
    except ValueError as error:
        return Rejudged(cell.id, recorded, obstacle=f"this version does not support what the subject declares: {error}")
    findings = verdict(trace, cell, behavior).findings
    # Take expectations and notes about the launch from the recorded run.
    expected = {result.check: result.expected for result in recorded}
    notes = [result for result in recorded if result.check == "launch" and result.outcome is Outcome.PASSED]
    older = not any(result.findings for result in recorded)  # older runs do not have the number of findings
    counted = None if older else len(findings) + len(notes)
    now = (Result.of(cell, found, reproduce, seconds, expected.get(found.check), counted) for found in findings)
    return Rejudged(cell.id, recorded, tuple(in_reading_order([*notes, *now])))


def use_recorded_workloads(recorded: Mapping[str, WorkloadSource], given: Sequence[str] = ()) -> dict[str, str]:
    """Load the workloads of a run from the places that the user gives.

    The places in the record are not used, because the run may come from anywhere and workloads are programs.

    Returns:
        Why a workload cannot be used, by its name: it was not given, is missing, or has changed.

    Raises:
        WorkloadError: one of ``given`` cannot be loaded.
    """
    found = {one.name: one for one in use_workloads(given)}
    differences = {name: _difference(name, source, found) for name, source in recorded.items()}
    return {name: difference for name, difference in differences.items() if difference}


def _difference(name: str, source: WorkloadSource, found: Mapping[str, OwnWorkload]) -> str | None:
    if not found:
        return (
            f"{name!r} is not a built-in workload, and programs named in a record are not run. If you trust it, add "
            f"--workload {shlex.quote(source.locator)}, or the path where the file is now"
        )
    if name not in found:
        return f"{', '.join({one.locator for one in found.values()})} no longer has a workload {name!r}"
    now = found[name]
    if now.sha256 == source.sha256:
        return None
    return (
        f"{now.locator} has changed since the run was recorded (the hash of its source and local imports was "
        f"{source.sha256[:12]}, and is {now.sha256[:12]}): restore that version, or run again"
    )
