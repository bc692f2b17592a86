"""Makes a search for each subject of a file, with the cells to draw from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from plumbline.core.accelerator import resolve_accelerator
from plumbline.core.cell import Cell
from plumbline.core.errors import PlanError
from plumbline.core.invocation import suites
from plumbline.hunt.search import TIME_LIMIT, Search
from plumbline.launch.pool import Pool
from plumbline.planning.declaration import Declaration
from plumbline.planning.expectation_files import Expectation, known_of_subject, read_expectations
from plumbline.planning.plan import SMOKE_WORKLOADS, Matrix, plan
from plumbline.workloads import WORKLOADS

TEXTS = ("lm-tokens",)
"""The workload that is planned for subjects with a loss of their own."""


def searches(
    pool: Pool, declared: Sequence[Declaration], gpus: int, scratch: Path, time_limit: float = TIME_LIMIT
) -> list[Search]:
    """Return a search for each declared subject, on cells of up to ``gpus`` devices; ``PlanError``: it has none."""
    accelerator = resolve_accelerator("auto", torch.cuda.device_count())
    expectations = read_expectations(suites() / "expectations")
    found = []
    for name in dict.fromkeys(one.name for one in declared):
        own = [one for one in declared if one.name == name]
        cells = cells_of(own, gpus, accelerator)
        if not cells:
            raise PlanError(f"{name} has no cell of up to {gpus} devices: raise --gpus")
        known = known_of_subject(name, own[0].software, expectations)
        found.append(Search(pool, own, cells, scratch, time_limit, known=_causes(known)))
    return found


def _causes(known: Iterable[Expectation]) -> set[str]:
    entries = [one.entry for one in known]
    return {
        f"{check}: {cause}" for one in entries for check in (*one.check, *one.consequences) for cause in one.cause or ()
    }


def cells_of(declared: Sequence[Declaration], gpus: int, accelerator: str) -> list[Cell]:
    """Return the subject's cells, those with few devices and float32 first.

    They belong to the first workload that has any: a pipeline of many stages needs a model of many blocks.
    """
    for plain in TEXTS if declared[0].behavior.own_loss else SMOKE_WORKLOADS:
        planned = plan(Matrix(gpus=gpus, workloads=(plain,), accelerator=accelerator), declared, WORKLOADS)
        cells = [one.cell for one in planned if one.refusal is None]
        if cells:
            return sorted(cells, key=lambda cell: (cell.topology.devices, cell.precision != "32"))
    return []
