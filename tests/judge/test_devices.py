"""A training is right on a type of device only if it ran there."""

from __future__ import annotations

import pytest

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.evidence.trace import RankTrace, Trace
from plumbline.judge.checks.launch import launch


@pytest.mark.parametrize(
    ("accelerator", "devices", "outcome"),
    [
        ("cuda", ("cpu",), Outcome.FAILED),
        ("cpu", ("cuda",), Outcome.FAILED),
        ("cuda", ("cpu", "cuda"), None),
        ("cuda", ("cuda",), None),
        ("cuda", (), None),
    ],
)
def test_the_device_that_computed_is_compared_with_that_of_the_cell(accelerator, devices, outcome):
    cell = Cell("mine", "mlp", "none", Topology(1, 1), "32", accelerator)
    found = launch(Trace((RankTrace(0, 1, (), devices=devices),)), cell)
    assert (found and found.outcome) is outcome
