"""Measures the trainer under test: speed, memory, and overhead over a hand-written loop.

    pytest suites/performance --gpus 8
    pytest suites/performance --gpus 4 --subject path/to/my_trainer.py --launches 10
    pytest suites/performance --benchmark-json new.json --benchmark-compare

One test is one cell. Each of its launches trains a warm-up and several rounds. Between rounds, all ranks wait at a
barrier with idle devices. pytest-benchmark times the rounds; the ranks' own clocks time the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbline.pytest_plugin.cases import BenchmarkCase


def test_cell(plumbline_benchmark: BenchmarkCase, benchmark: Any) -> None:
    plumbline_benchmark.measure(benchmark)
