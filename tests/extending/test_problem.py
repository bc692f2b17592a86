"""A problem is a protocol: the judge needs nothing of a workload beyond it."""

from __future__ import annotations

from types import SimpleNamespace

from plumbline.core.outcome import Outcome, worst
from plumbline.judge.judge import judge
from plumbline.launch.cell_launch import launch
from plumbline.launch.settings import Settings
from plumbline.workloads import WORKLOADS, Problem

MEMBERS = [name for name in vars(Problem) if not name.startswith("_")]


def test_what_keeps_the_protocol_is_judged(outside, warm_pool, cell_of, tmp_path):
    problem = SimpleNamespace(**{name: getattr(WORKLOADS["mlp"], name) for name in MEMBERS})
    cell = cell_of("mlp", "ddp", "1x2", subject="by-hand")
    trace = launch(warm_pool(outside("subject")), cell, tmp_path, Settings(600))
    findings = judge(trace, problem, cell)
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings


def test_every_workload_keeps_the_protocol():
    for workload in WORKLOADS.values():
        assert all(hasattr(workload, name) for name in MEMBERS)
