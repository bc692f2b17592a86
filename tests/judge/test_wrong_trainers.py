"""Known-bad trainers, with real ranks: one of each family here; ``suites/detection`` has all of them at night."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plumbline.core.outcome import Outcome
from plumbline.subjects.load import load
from plumbline.workloads import WORKLOADS

TRAINERS = load(str(Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"))
EXPECTATIONS = {trainer.name: trainer.train.expectation for trainer in TRAINERS}
cell_of = sys.modules["expect"].cell_of


def first_of_each_file():
    """Return, for each file of the suite, a trainer with its first cell and the check that must fail there."""
    found = {}
    for trainer in TRAINERS:
        cell, check = next(iter(trainer.train.expectation.cells.items()))
        found.setdefault(trainer.train.expectation_file, (trainer.name, cell, check))
    return found


@pytest.mark.parametrize(("subject", "cell", "check"), first_of_each_file().values(), ids=first_of_each_file())
def test_one_trainer_of_each_family(verdict, subject, cell, check):
    findings, _ = verdict(subject, *cell.split("/"))
    mismatch = EXPECTATIONS[subject].mismatch(tuple(findings.values()), check)
    assert mismatch is None, mismatch


def test_every_narrow_workload_exposes_something():
    exposing = {cell_of(cell, "").workload for one in EXPECTATIONS.values() if not one.good for cell in one.cells}
    assert {name for name, workload in WORKLOADS.items() if workload.narrow} <= exposing


@pytest.mark.parametrize(
    ("subject", "check"),
    [
        ("loss-times-zero", "update"),
        ("zeroed-before-the-step", "update"),
        ("rate-is-zero", "update"),
        ("never-trains", "steps"),
    ],
)
def test_where_nothing_moves_there_is_no_verdict(verdict, subject, check):
    findings, outcome = verdict(subject, "mlp", "ddp", "1x2")
    assert outcome is Outcome.ERRORED
    assert findings[check].outcome is Outcome.ERRORED
    assert "vacuous" in findings[check].message


def test_numbers_that_are_not_finite_have_an_error_without_bounds(verdict):
    findings, outcome = verdict("scale-that-always-overflows", "mlp", "ddp", "1x2", "16")
    assert outcome is Outcome.FAILED
    assert findings["update"].outcome is Outcome.FAILED
    assert findings["gradients"].error_x_noise == float("inf")
    assert findings["ranks-agree"].outcome is Outcome.PASSED, "all ranks hold the same infinities"


def test_an_order_that_depends_on_the_number_of_devices_fails(verdict):
    findings, _ = verdict("shards-kept", "mlp", "ddp", "1x2")
    assert findings["samples"].outcome is Outcome.FAILED
    assert (findings["samples"].family, findings["samples"].cause) == ("data", "shards-kept")


def test_a_wrong_rank_is_named(verdict):
    findings, _ = verdict("biases-not-broadcast", "mlp", "ddp", "1x2")
    assert findings["initial-weights"].rank == 1
    assert findings["initial-weights"].parameter.endswith("bias")


def test_a_forgotten_parameter_is_named(verdict):
    findings, _ = verdict("parameter-missing", "mlp", "ddp", "1x2")
    assert findings["gradients"].parameter == "layers.2.bias"
