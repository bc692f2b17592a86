"""Regression tests: shrunk problems on which the judge once accused a right trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plumbline.core.topology import Topology
from plumbline.engine.examine import examine
from plumbline.hunt.search import trained_on, write_problem
from plumbline.launch.cell_launch import Settings
from plumbline.own_workloads.load import workload_of
from plumbline.workloads import WORKLOADS
from plumbline.workloads.generated import Recipe

ALTERNATING = Recipe(optimizer="several", accumulate=2, steps_per_epoch=2)
CENTRED = Recipe(layers=("layernorm", "batchnorm", "batchnorm"), batch_size=8, epochs=2)

LIBRARIES = {"reference": "torch", "train-loop": "torch", "fabric": "lightning"}

PROBLEMS = {
    "the last batch of a window passes in micro-batches": ("reference", "balanced", (1, 2), "32", ALTERNATING),
    "statistics between alternating optimizers": (
        "reference", "balanced", (1, 2), "32",
        replace(ALTERNATING, layers=("linear-5", "batchnorm"), batch_size=16, steps_per_epoch=3, epochs=2),
    ),
    "an evaluation between alternating optimizers": (
        "reference", "none", (1, 1), "32", replace(ALTERNATING, batch_size=1, validate_every=1),
    ),
    "a schedule that waits for its optimizer": (
        "reference", "ddp", (2, 1), "16",
        Recipe(optimizer="several", schedule="warm-up", batch_size=1, steps_per_epoch=3, returns="nested", seed=9),
    ),
    "a held-out loss that overflows": (
        "reference", "ddp2", (2, 2), "16",
        Recipe(layers=("attention",) * 3, batch_size=5, steps_per_epoch=2, left_out=2, returns="nested", seed=632),
    ),
    "statistics of what is centred already": ("torch", "tp", (2, 2), "64", CENTRED),
    "an entry that all but cancels out, of which Adam makes a whole step": (
        "train-loop", "dp", (1, 4), "16",
        Recipe(inputs="images", layers=("linear-5", "experts"), optimizer="adam", batch_size=13, shuffle=True, seed=82),
    ),
    "optimizers-of-fabric-clipped-together": (
        "fabric", "none", (1, 1), "16",
        replace(ALTERNATING, layers=("residual", "attention"), steps_per_epoch=6, clip_norm=0.05),
    ),
    "a stage without parameters has the schedules of the others": (
        "torch", "pp", (1, 4), "32",
        Recipe(layers=("tanh", "tanh"), optimizer="momentum", schedule="warm-up", batch_size=16, steps_per_epoch=2,
               epochs=2, interrupt_after=1),
    ),
    "optimizers in another order than their parameters": (
        "torch", "none", (1, 1), "32", Recipe(inputs="images", optimizer="muon", batch_size=2),
    ),
    "a block of a rank without matrices": (
        "torch", "tp", (2, 1), "64", Recipe(loss="in-batch", optimizer="muon", batch_size=1, seed=1),
    ),
    "a loss that overflows while its gradient does not": (
        "torch", "ddp", (1, 3), "32",
        Recipe(layers=("adapter",), loss="squares", batch_size=10, steps_per_epoch=2, epochs=2, left_out=2, seed=356),
    ),
    "an optimizer of frozen parameters": (
        "torch", "none", (1, 1), "16", Recipe(layers=("adapter",), optimizer="muon"),
    ),
    "optimizers-that-lightning-leaves-to-its-users": (
        "lightning", "none", (1, 1), "32",
        replace(ALTERNATING, steps_per_epoch=3, epochs=2, schedule="warm-up", clip_norm=0.05, validate_every=2,
                metrics=True, interrupt_after=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_right_trainer_is_not_accused_any_more(warm_pool, cell_of, tmp_path, problem):
    subject, backend, topology, precision, recipe = PROBLEMS[problem]
    pytest.importorskip(LIBRARIES.get(subject, subject))
    plain = cell_of("mlp", backend, str(Topology(*topology)), precision, subject=subject)
    cell = trained_on(plain, recipe, write_problem(recipe, tmp_path))
    try:
        workload_of(cell)
        findings = examine(warm_pool(subject), cell, tmp_path / "trace", Settings(60.0)).findings
    finally:
        WORKLOADS.pop(cell.workload, None)
    assert not [one for one in findings if one.outcome.is_bad], findings
