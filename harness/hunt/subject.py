"""Searches that are ready to begin, one for each subject of a file: the pool, what it declares, cells to draw from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from harness.core.accelerator import resolve_accelerator
from harness.core.cell import Cell
from harness.core.errors import PlanError
from harness.core.invocation import suites
from harness.hunt.search import Search
from harness.launch.pool import Pool
from harness.planning.declaration import Declaration
from harness.planning.expectation_files import Expectation, read_expectations
from harness.planning.expectations import known_of_subject
from harness.planning.plan import Matrix, plan
from harness.workloads import WORKLOADS

PLAIN, TEXTS = "mlp", "lm-tokens"
"""The workload of the plan whose cells are drawn from, which every cell of a subject has.

The second is for subjects that train with no other loss than theirs.
"""


def searches(pool: Pool, declared: Sequence[Declaration], gpus: int, scratch: Path) -> list[Search]:
    """Return a search for each subject that ``pool`` has, on cells of up to ``gpus`` devices.

    Raises:
        PlanError: a subject has no cell.
    """
    accelerator = resolve_accelerator("auto", torch.cuda.device_count())
    expectations = read_expectations(suites() / "expectations")
    found = []
    for name in dict.fromkeys(one.name for one in declared):
        own = [one for one in declared if one.name == name]
        cells = cells_of(own, gpus, accelerator)
        if not cells:
            raise PlanError(f"{name} has no cell of up to {gpus} devices: raise --gpus")
        known = known_of_subject(name, own[0].software, expectations)
        found.append(Search(pool, own, cells, scratch, known=_causes(known)))
    return found


def _causes(known: Iterable[Expectation]) -> set[str]:
    return {f"{check}: {cause}" for one in known for check in one.entry.check for cause in one.entry.cause or ()}


def cells_of(declared: Sequence[Declaration], gpus: int, accelerator: str) -> list[Cell]:
    """Return the subject's cells, the simplest first: few devices, float32."""
    plain = TEXTS if declared[0].behavior.own_loss else PLAIN
    planned = plan(Matrix(gpus=gpus, workloads=(plain,), accelerator=accelerator), declared, WORKLOADS)
    cells = [one.cell for one in planned if one.refusal is None]
    return sorted(cells, key=lambda cell: (cell.topology.devices, cell.precision != "32"))
