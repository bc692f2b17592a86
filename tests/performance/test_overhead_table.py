"""Trainers' overheads over a hand-written loop are listed side by side, with bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.results.records import Measurement

OVERHEAD = Path(__file__).parents[2] / "suites" / "performance" / "overhead.py"


@pytest.fixture(scope="module")
def table(program):
    """The suite's function."""
    return program(OVERHEAD).table


def measured(subject, backend="none", metric="overhead", **figure):
    devices = 1 if backend == "none" else 2
    cell = Cell(subject, "perf-mlp", backend, Topology(1, devices), "32", "cpu")
    return Measurement.of(cell, metric, "ratio", "lower", **figure)


def test_a_line_is_a_strategy_and_a_column_a_trainer(table):
    head, rule, *rows = table(
        [
            measured("reference", value=1.01, low=1.0, high=1.02),
            measured("reference", "dp", value=1.03, low=1.0, high=1.06),
            measured("lightning", value=2.0, low=1.9, high=2.1),
            measured("lightning", metric="throughput", value=9.0),
        ]
    )
    assert head.split("|")[2].strip() == "reference"
    assert head.split("|")[3].strip() == "lightning"
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells == [
        ["perf-mlp none 1x1 32", "× 1.010 (1.000 … 1.020)", "× 2.000 (1.900 … 2.100)"],
        ["perf-mlp dp 1x2 32", "× 1.030 (1.000 … 1.060)", ""],
    ]


def test_what_is_unstable_is_no_figure(table):
    (row,) = table([measured("reference", low=0.5, high=2.0, refusal="unstable: …")])[2:]
    assert "unstable" in row


def test_without_a_loop_by_hand_there_is_no_table(table):
    assert table([measured("reference", metric="throughput", value=1.0)]) == []
