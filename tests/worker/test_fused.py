"""A fused optimizer unscales gradients and skips steps in its kernel: it is recorded and judged like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings

SUBJECT = Path(__file__).parent / "subjects" / "fused.py"


@pytest.mark.parametrize(("workload", "precision"), [("mlp", "16"), ("adamw", "32"), ("overflow", "16")])
def test_a_right_trainer_with_a_fused_optimizer_is_not_accused(warm_pool, cell_of, tmp_path, workload, precision):
    cell = cell_of(workload, "none", "1x1", precision, subject="fused")
    found = examine(warm_pool(SUBJECT), cell, tmp_path, Settings(600)).findings
    assert found
    assert not [f"{finding.check}: {finding.message}" for finding in found if finding.outcome.is_bad]
