"""A complete training is judged on its evidence, however its teardown ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plumbline.core.outcome import Outcome

TEARDOWNS = Path(__file__).parent / "subjects" / "teardowns.py"


@pytest.fixture(scope="module")
def pool(warm_pool):
    return warm_pool(TEARDOWNS)


@pytest.mark.parametrize(("subject", "launches"), [("destroys", 5), ("releases-first", 2), ("children-destroy", 1)])
def test_a_group_that_is_destroyed_hangs_nobody(launched, pool, subject, launches):
    """ci/teardowns.py launches hundreds of times; without what is tested here, most of these few hang too."""
    for _ in range(launches):
        trace, findings, _ = launched(subject, "1x4", pool=pool)
        assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
        assert not trace.hung
        assert "launch" not in findings


@pytest.mark.parametrize(
    ("subject", "hanging"), [("rank-0-waits", 2), ("hangs-after-destroying", 2), ("children-wait", 1)]
)
def test_a_complete_training_whose_teardown_hangs_passes_with_a_note(launched, pool, subject, hanging):
    trace, findings, folder = launched(subject, pool=pool, hanging=hanging)
    assert {finding.outcome for finding in findings.values()} == {Outcome.PASSED}
    assert 0 in trace.hung
    note = findings["launch"].message
    assert "The training was complete" in note
    assert f"torch {torch.__version__}" in note
    assert not list(folder.glob("*.so-far")), "nothing is left beside the evidence"


def test_where_a_rank_hangs_in_a_collective_the_note_names_it(launched, pool):
    _, findings, _ = launched("rank-0-waits", pool=pool, hanging=2)
    assert "barrier" in findings["launch"].message


def test_a_wrong_training_whose_teardown_hangs_fails_for_what_is_wrong(launched, pool):
    _, findings, _ = launched("doubles-and-hangs", pool=pool, hanging=2)
    assert findings["launch"].outcome is Outcome.PASSED
    assert findings["gradients"].outcome is Outcome.FAILED


def test_a_training_that_hangs_before_its_last_step_timed_out(launched, pool):
    trace, findings, folder = launched("hangs-in-the-middle", pool=pool, hanging=2)
    assert findings.keys() == {"launch"}
    assert findings["launch"].outcome is Outcome.TIMED_OUT
    assert trace.exits.keys() == {0, 1}
    assert not list(folder.glob("*.safetensors")), "half a training is not judged one day"


def test_a_rank_that_dies_in_its_teardown_has_crashed(launched, pool):
    trace, findings, folder = launched("dies-after-destroying", pool=pool)
    assert findings["launch"].outcome is Outcome.CRASHED
    assert findings["launch"].rank == 1
    assert trace.exits.keys() == {1}
    assert not list(folder.glob("*.so-far"))
