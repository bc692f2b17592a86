"""Launching a trainer that ends somehow, and seeing who is left."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from harness.judge.judge import judge
from harness.launch.cell_launch import launch
from harness.launch.settings import Settings
from harness.workloads import WORKLOADS

ENDS = Path(__file__).parent / "subjects" / "ends.py"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The judge's tensors are small."""


@pytest.fixture(scope="session")
def ends(warm_pool):
    """Return the pool of trainers that end in every way."""
    return warm_pool(ENDS)


@pytest.fixture
def launched(ends, cell_of, tmp_path):
    """Launch a trainer of ``ends``; return its trace, its findings by the check's name, and its folder."""

    def launched(subject, topology="1x2", *, backend="ddp", time_limit=30.0, pool=ends, workload="mlp"):
        backend = "none" if topology == "1x1" else backend
        cell = cell_of(workload, backend, topology, subject=subject)
        folder = tmp_path / subject
        trace = launch(pool, cell, folder, Settings(time_limit))
        findings = {finding.check: finding for finding in judge(trace, WORKLOADS[workload], cell)}
        return trace, findings, folder

    return launched


@pytest.fixture
def is_gone():
    """Say whether a process ends within some seconds; one that is nobody's yet counts as ended."""

    def is_gone(pid: int, seconds: float = 10.0) -> bool:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)

    return is_gone
