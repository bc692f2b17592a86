"""A profiled launch leaves traces that can be opened, does not affect figures, and never fails a cell."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from plumbline.benchmark.timed_launch import profiled
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.cell_launch import Settings
from plumbline.worker.timing import profiler
from plumbline.worker.timing.profiler import PROFILED_STEPS, StepProfile


@pytest.fixture
def profile(tmp_path):
    return StepProfile(str(tmp_path), 3, "cpu")


def train(profile, steps=PROFILED_STEPS + 2):
    profile.start()
    for _ in range(steps):
        torch.ones(8, 8) @ torch.ones(8, 8)
        profile.end_step()


def events(path):
    with gzip.open(path) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_trace_has_the_operations_of_a_few_steps(profile, tmp_path):
    train(profile)
    assert profile.problems == []
    names = events(tmp_path / "rank-3.trace.json.gz")
    assert names.count("aten::mm") == PROFILED_STEPS
    assert [name for name in names if name.startswith("step ")] == [f"step {n} begins" for n in range(PROFILED_STEPS)]


def test_a_profiler_that_fails_is_a_problem_and_no_error(profile, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("another profiler is running")

    monkeypatch.setattr(torch.profiler, "profile", refuses)
    train(profile)
    assert profile.problems == ["rank 3, trace: RuntimeError: another profiler is running"]


def test_a_file_that_no_browser_opens_is_not_kept(profile, tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "MOST_BYTES", 10)
    train(profile)
    assert "the limit is" in profile.problems[0]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def launched(trainers, tmp_path_factory):
    """Profile a launch of one of the trainers on two ranks."""

    def launch(subject, workload):
        cell = Cell(subject, workload, "ddp", Topology(1, 2), "32", "cpu")
        return profiled(trainers, cell, lambda: tmp_path_factory.mktemp("p"), Settings(60.0))

    return launch


def test_each_rank_leaves_a_trace(launched):
    record, folder = launched("plain", "perf-gpt")
    assert record.problems == ()
    assert record.files == tuple(f"profiles/plain-perf-gpt-ddp-1x2-32/rank-{n}.trace.json.gz" for n in (0, 1))
    for rank in (0, 1):
        assert "gloo:all_reduce" in events(folder / f"rank-{rank}.trace.json.gz")


def test_a_launch_that_fails_is_a_problem_of_the_profile(launched):
    record, folder = launched("raises", "perf-mlp")
    assert "the profiled launch failed" in record.problems[0]
    assert [f"profiles/raises-perf-mlp-ddp-1x2-32/{file.name}" for file in sorted(folder.iterdir())] == [*record.files]
