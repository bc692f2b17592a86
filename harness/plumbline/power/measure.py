"""Selects cells, trains each with several seeds, and measures the limits of the judge in each training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plumbline.core.accelerator import resolve_accelerator
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError, TraceError
from plumbline.engine.examine import examine
from plumbline.evidence.read import read_trace
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import behavior_of
from plumbline.launch.pool import Pool
from plumbline.launch.settings import Settings
from plumbline.own_workloads.load import use_workloads, workload_of
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.power.threshold import CAUGHT, KINDS, caught_in_most, number_of
from plumbline.workloads import WORKLOADS


def cells_of(
    declared: Sequence[Declaration],
    workload: str,
    gpus: int,
    backends: Sequence[str] | None,
    precisions: Sequence[str] | None,
) -> list[Cell]:
    """Return the subject's cells of a workload, by name or file; raise ``PlanError`` where there are none."""
    names = (workload,) if workload in WORKLOADS else tuple(own.name for own in use_workloads([workload]))
    matrix = Matrix(
        gpus=gpus,
        workloads=names,
        backends=None if backends is None else tuple(backends),
        precisions=None if precisions is None else tuple(precisions),
        accelerator=resolve_accelerator("auto", torch.cuda.device_count()),
    )
    cells = [one.cell for one in plan(matrix, declared, WORKLOADS) if one.refusal is None]
    if not cells:
        raise PlanError(f"{declared[0].name} has no cell of {workload} on up to {gpus} devices with these options")
    return cells


class NotRightError(Exception):
    """The training is already wrong, so the effect of an added error cannot be measured."""


@dataclass(frozen=True)
class Power:
    """The smallest relative errors of a ``kind`` that are caught in 99 % (``limit``) and in half of the runs.

    They are None if nothing could be judged.
    """

    cell: Cell
    kind: str
    runs: int
    limit: float | None
    median: float | None

    @property
    def caught(self) -> int:
        """Runs in which an error as large as the limit is caught."""
        return number_of(CAUGHT, self.runs)


def measure(pool: Pool, cell: Cell, folder: Path, *, runs: int, trainings: int) -> Iterator[Power]:
    """Yield the power for each kind of error, over ``runs`` places in ``trainings`` with different seeds."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for seed in range(trainings):
        seeded = replace(cell, seed=seed)
        try:
            findings = examine(pool, seeded, folder, Settings()).findings
            bad = [one for one in findings if one.outcome.is_bad]
            if bad:
                raise NotRightError(f"{cell.id} with seed {seed}: {bad[0].check}: {bad[0].message}")
            trace = read_trace(folder)
        except TraceError as error:
            raise NotRightError(f"{cell.id} with seed {seed}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        analysis = TraceAnalysis(trace, workload_of(seeded), seeded, behavior_of(pool, seeded))
        for name, limits in KINDS.items():
            found[name] += limits(analysis, trace, -(-runs // trainings), seed)
    for name, one in found.items():
        yield Power(cell, name, len(one), caught_in_most(one), caught_in_most(one, 0.5))
