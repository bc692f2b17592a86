"""Selects the cells in which the power of the checks is measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plumbline.core.accelerator import resolve_accelerator
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.own_workloads.load import use_workloads
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.workloads import WORKLOADS


def cells_of(
    declared: Sequence[Declaration],
    workload: str,
    gpus: int,
    backends: Sequence[str] | None,
    precisions: Sequence[str] | None,
) -> list[Cell]:
    """Return the subject's cells of a workload, by name or file, on up to ``gpus`` devices.

    Raises:
        PlanError: the subject has no such cell.
        WorkloadError: there is no such workload.
    """
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
