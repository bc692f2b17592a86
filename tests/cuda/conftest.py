"""Cells on CUDA devices, trained and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings

TIME_LIMIT_S = 120.0
"""For one launch: the first one on a device starts its driver and loads its libraries."""


@pytest.fixture
def accelerator():
    """The accelerator of these tests' cells."""
    return "cuda"


@pytest.fixture
def cuda_cell(accelerator):
    """Return a cell on CUDA devices from words."""

    def cell(subject: str, workload: str, backend: str, topology: str, precision: str = "32") -> Cell:
        nodes, gpus = map(int, topology.split("x"))
        return Cell(subject, workload, backend, Topology(nodes, gpus), precision, accelerator)

    return cell


@pytest.fixture
def wrong(warm_pool, tmp_path):
    """Train and judge a cell; return its bad findings by check."""

    def examined(locator: str | Path, cell: Cell, *, oversubscribe: bool = False) -> dict[str, str]:
        found = examine(warm_pool(locator), cell, tmp_path, Settings(TIME_LIMIT_S, oversubscribe)).findings
        assert found
        return {f"{finding.check} {finding.cause}": finding.message for finding in found if finding.outcome.is_bad}

    return examined
