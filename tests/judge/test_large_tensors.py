"""The verdict does not change if large tensors are in the launch's store instead of each rank's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.finding import in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.evidence.tensor_store import FOLDER
from plumbline.launch.cell_launch import Settings

EVERYBODY = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"
STARTING = Path(__file__).parents[1] / "launch" / "subjects" / "reference_starting.py"
ALL, NONE = Settings(300, store_above=0), Settings(300, store_above=2**40)


@pytest.mark.parametrize(
    ("subject", "workload", "backend", "topology", "precision"),
    [
        ("summed-not-averaged", "mlp", "ddp", "1x2", "32"),
        ("forward-through-the-inner-module", "mlp", "ddp", "1x2", "32"),
        ("rank-zero-broadcasts-its-own-gradient", "mlp", "ddp", "1x3", "32"),
        ("one-parameter-forgotten", "mlp", "ddp", "2x2", "bf16"),
        ("each-device-its-own-negatives", "contrastive", "dp", "1x2", "32"),
        ("tiny-buckets", "linear-exact", "ddp", "1x4", "32"),
    ],
)
def test_findings_are_the_same_to_the_last_digit(
    warm_pool, cell_of, tmp_path, subject, workload, backend, topology, precision
):
    cell = cell_of(workload, backend, topology, precision, subject=subject)
    pool = warm_pool(EVERYBODY)
    stored, own = (
        in_reading_order(examine(pool, cell, tmp_path / name, settings).findings)
        for name, settings in (("stored", ALL), ("own", NONE))
    )
    assert stored == own
    assert {file.name for file in (tmp_path / "own").iterdir()}.isdisjoint({FOLDER})


@pytest.mark.parametrize("workload", ["mlp", "checkpoint", "overflow"])
def test_more_ranks_of_a_right_trainer_write_no_more_tensors(warm_pool, cell_of, tmp_path, workload):
    written = {}
    for topology in ("1x1", "1x3"):
        backend = "none" if topology == "1x1" else "ddp"
        cell = cell_of(workload, backend, topology, "16" if workload == "overflow" else "32", subject="reference")
        findings = examine(warm_pool("reference"), cell, tmp_path / topology, ALL).findings
        assert {finding.outcome for finding in findings} == {Outcome.PASSED}
        written[topology] = sum(file.stat().st_size for file in (tmp_path / topology / FOLDER).iterdir())
    assert 0 < written["1x3"] <= written["1x1"]


@pytest.mark.parametrize("subject", ["forking", "spawning"])
def test_ranks_that_a_subject_starts_write_to_the_store_too(warm_pool, cell_of, tmp_path, subject):
    cell = cell_of("mlp", "ddp", "1x2", "32", subject=subject)
    findings = examine(warm_pool(STARTING), cell, tmp_path, ALL).findings
    assert {finding.outcome for finding in findings} == {Outcome.PASSED}
    assert any((tmp_path / FOLDER).iterdir())


def test_a_launch_begins_with_an_empty_store(warm_pool, cell_of, tmp_path):
    """A killed launch may have left half of a tensor in a reused folder."""
    cell = cell_of("mlp", "none", "1x1", "32", subject="torch")
    for _ in range(2):
        findings = examine(warm_pool("torch"), cell, tmp_path, ALL).findings
        assert {finding.outcome for finding in findings} == {Outcome.PASSED}
        for file in (tmp_path / FOLDER).iterdir():
            file.write_bytes(file.read_bytes()[:2])


def test_a_store_that_cannot_be_written_is_no_mistake_of_the_trainers(warm_pool, cell_of, tmp_path):
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    cell = cell_of("mlp", "ddp", "1x2", "32", subject="torch")
    (finding,) = examine(warm_pool("torch"), cell, tmp_path, ALL).findings
    assert (finding.check, finding.outcome) == ("launch", Outcome.ERRORED)
    assert "cannot be written" in finding.message
    assert str(tmp_path / FOLDER) in finding.message
