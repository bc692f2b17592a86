"""The cells of one subject in which the power of the checks is measured, and the pool that trains them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

import torch

from harness.core.accelerator import resolve_accelerator
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.launch.pool import Pool
from harness.own_workloads.load import use_workloads
from harness.planning.declaration import Declaration
from harness.planning.plan import Matrix, plan
from harness.subjects.locator import parse_subject
from harness.workloads import WORKLOADS


def opened(
    subject: str, workload: str, gpus: int, backends: Sequence[str] | None, precisions: Sequence[str] | None
) -> tuple[Pool, list[Cell]]:
    """Return a pool of the subject, which the caller closes, and its cells of a workload on up to ``gpus`` devices.

    Raises:
        PlanError: the subject has no such cell.
        SubjectError, WorkloadError: there is no such subject, or no such workload.
    """
    torch.set_num_threads(1)  # as the session that judges for pytest
    names = (workload,) if workload in WORKLOADS else tuple(own.name for own in use_workloads([workload]))
    locator, python = parse_subject(subject)
    with ExitStack() as undo:
        pool = undo.enter_context(closing(Pool(locator, python)))
        declared = [Declaration.of(locator, values) for values in pool.subjects]
        matrix = Matrix(
            gpus=gpus,
            workloads=names,
            backends=None if backends is None else tuple(backends),
            precisions=None if precisions is None else tuple(precisions),
            accelerator=resolve_accelerator("auto", torch.cuda.device_count()),
        )
        cells = [one.cell for one in plan(matrix, declared, WORKLOADS) if one.refusal is None]
        if not cells:
            raise PlanError(f"--subject {subject} has no cell of {workload} on up to {gpus} devices with these options")
        undo.pop_all()
    return pool, cells
