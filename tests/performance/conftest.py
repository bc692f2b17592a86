"""Groups of ranks to time, from a warm pool of trainers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plumbline.benchmark.timed_launch import TimedLaunch
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.cell_launch import Settings

TRAINERS = Path(__file__).parent / "subjects" / "timed.py"


@pytest.fixture(scope="session")
def notes(tmp_path_factory):
    """The folder for the notes of ``keeps-time``."""
    folder = tmp_path_factory.mktemp("notes")
    os.environ["TIMED_NOTES"] = str(folder)
    yield folder
    del os.environ["TIMED_NOTES"]


@pytest.fixture(scope="session")
def trainers(notes, warm_pool):
    """The pool of trainers to time."""
    return warm_pool(TRAINERS)


@pytest.fixture
def begun(trainers, tmp_path_factory):
    """Start a group: ``begun("plain", "1x2", "perf-mlp")``; all groups that still run are stopped at the end."""
    groups = []

    def begin(subject, topology="1x1", workload="perf-mlp", precision="32", *, time_limit=600.0, pool=trainers):
        nodes, gpus = map(int, topology.split("x"))
        backend = "none" if topology == "1x1" else "ddp"
        cell = Cell(subject, workload, backend, Topology(nodes, gpus), precision, "cpu")
        group = TimedLaunch.begin(pool, cell, tmp_path_factory.mktemp("g"), Settings(time_limit))
        groups.append(group)
        return group

    yield begin
    for group in groups:
        group.close()


@pytest.fixture
def timed(begun):
    """Time a whole launch: ``timed("plain", "1x2")`` returns its ranks' reports."""

    def whole(*which, rounds=4, **settings):
        group = begun(*which, **settings)
        for _ in range(rounds):
            group.round()
        group.profile()
        return group.end()

    return whole
