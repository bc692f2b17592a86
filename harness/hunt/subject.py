"""A search that is ready to begin: the subject's pool, what it declares, and the cells to draw from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from harness.core.accelerator import resolve_accelerator
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.core.invocation import suites
from harness.hunt.search import Search
from harness.launch.pool import Pool
from harness.planning.declaration import Declaration
from harness.planning.expectation_files import read_expectations
from harness.planning.expectations import known_of_subject
from harness.planning.plan import Matrix, plan
from harness.subjects.locator import parse_subject
from harness.workloads import WORKLOADS

PLAIN = "mlp"
"""The workload of the plan whose cells are drawn from: every cell of a subject has it."""


def started(subject: str, gpus: int, scratch: Path) -> Search:
    """Return a search on cells of up to ``gpus`` devices, whose pool the caller closes.

    Raises:
        PlanError: there are several subjects, or none has a cell.
        SubjectError: there is no such subject.
    """
    torch.set_num_threads(1)  # as the session that judges for pytest
    locator, python = parse_subject(subject)
    with ExitStack() as undo:
        pool = undo.enter_context(closing(Pool(locator, python)))
        declared = [Declaration.of(locator, values) for values in pool.subjects]
        if len({one.name for one in declared}) > 1:
            names = ", ".join(f"{locator}::{one.name}" for one in declared)
            raise PlanError(f"--subject {subject} has several subjects, and a hunt is on one: {names}")
        accelerator = resolve_accelerator("auto", torch.cuda.device_count())
        cells = cells_of(declared, gpus, accelerator)
        if not cells:
            raise PlanError(f"--subject {subject} has no cell of up to {gpus} devices")
        known = known_of_subject(declared[0].name, declared[0].software, read_expectations(suites() / "expectations"))
        undo.pop_all()
    causes = {f"{check}: {cause}" for one in known for check in one.entry.check for cause in one.entry.cause or ()}
    return Search(pool, declared, cells, scratch, known=causes)


def cells_of(declared: Sequence[Declaration], gpus: int, accelerator: str) -> list[Cell]:
    """Return the subject's cells, the simplest first: few devices, float32."""
    planned = plan(Matrix(gpus=gpus, workloads=(PLAIN,), accelerator=accelerator), declared, WORKLOADS)
    cells = [one.cell for one in planned if one.refusal is None]
    return sorted(cells, key=lambda cell: (cell.topology.devices, cell.precision != "32"))
