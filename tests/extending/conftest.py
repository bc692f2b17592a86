"""Extensions from outside the package, one file of each kind in ``outside/``; registries are restored."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.precision import PRECISIONS
from plumbline.judge.checks import CHECKS, TrainingRecord
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, behavior_of, launch
from plumbline.workloads import WORKLOADS, find

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The judge's tensors are small."""


@pytest.fixture
def outside():
    """Import a file like ``-p``, which registers its contents; return it as the locator of its subjects."""

    def imported(name):
        for registry in (BACKENDS, CHECKS[TrainingRecord], PRECISIONS, WORKLOADS):
            kept.append((registry, dict(registry)))
        spec = importlib.util.spec_from_file_location(f"outside_{name}", OUTSIDE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return OUTSIDE / f"{name}.py"

    kept = []
    yield imported
    for registry, before in reversed(kept):
        registry.clear()
        registry.update(before)


@pytest.fixture
def trained(warm_pool, cell_of, tmp_path):
    """Train a cell of a subject in ``outside/`` with real ranks; return its findings by check."""

    def trained(locator, subject, workload, backend, topology, precision="32"):
        cell = cell_of(workload, backend, topology, precision, subject=subject)
        pool = warm_pool(locator)
        trace = launch(pool, cell, tmp_path / cell.id, Settings(600))
        findings = judge(TraceAnalysis(trace, find(workload), cell, behavior_of(pool, cell)))
        return {finding.check: finding for finding in findings}

    return trained
