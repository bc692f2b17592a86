"""The hand-written loops for overhead compute what their strategy promises: they are judged like any trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

YARDSTICKS = Path(__file__).parents[2] / "suites" / "performance" / "yardsticks.py"

PLACES = {"none": "1x1", "dp": "1x3", "ddp": "1x3", "ddp2": "2x2"}
ASKED = [
    *((workload, "32") for workload in ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")),
    ("mlp", "16"),
    ("cnn-batchnorm", "bf16"),
    ("mlp", "64"),
]


@pytest.mark.parametrize(("workload", "precision"), ASKED)
@pytest.mark.parametrize("backend", PLACES)
def test_a_yardstick_is_right(warm_pool, cell_of, tmp_path, backend, workload, precision):
    cell = cell_of(workload, backend, PLACES[backend], precision, subject="yardstick")
    found = examine(warm_pool(YARDSTICKS), cell, tmp_path / "evidence", Settings(600)).findings
    assert {finding.outcome for finding in found} <= {Outcome.PASSED, Outcome.DEVIATES}, found
    assert Outcome.PASSED in {finding.outcome for finding in found}
