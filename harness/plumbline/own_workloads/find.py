"""The workload of a cell, loaded in this process if it is the user's own."""

from __future__ import annotations

from plumbline.core.cell import Cell
from plumbline.own_workloads.load import load_workload
from plumbline.workloads import EVERY, WORKLOADS, Workload, find


def workload_of(cell: Cell) -> Workload:
    """Return the workload of ``cell``, with the cell's seed.

    Raises:
        WorkloadError: the user's own workload cannot be loaded.
    """
    known = EVERY.get(cell.workload)
    if cell.workload_locator is not None and (known is None or known.locator != cell.workload_locator):
        WORKLOADS[cell.workload] = load_workload(cell.workload_locator)
    return find(cell.workload, cell.seed)
