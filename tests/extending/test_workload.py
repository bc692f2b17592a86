"""A new workload needs one file."""

from __future__ import annotations

import pytest

from plumbline.core.outcome import Outcome, worst
from plumbline.core.training_behavior import EVERY_OTHER
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, plan
from plumbline.workloads import Workload, register


def test_it_is_planned(outside):
    outside("workload")
    able = Declaration("mine", "workload.py", ("none", "ddp"), {EVERY_OTHER: ("32",)}, frozenset())
    planned = plan(Matrix(2, workloads=("regression",), precisions=("32",), backends=("none", "ddp")), [able])
    assert {(one.cell.workload, one.refusal) for one in planned} == {("regression", None)}


def test_it_is_launched_and_judged(outside, trained):
    findings = trained(outside("workload"), "torch", "regression", "ddp", "1x2")
    assert {"gradients", "update", "training"} <= findings.keys()
    assert worst(finding.outcome for finding in findings.values()) is Outcome.PASSED, findings


def test_a_name_that_is_taken_is_refused():
    class Namesake(Workload):
        name = "mlp"

    with pytest.raises(ValueError, match="there is already a workload 'mlp'"):
        register(Namesake())
