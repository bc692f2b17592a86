"""How fast is the trainer under test, how much memory does it take, and what does it cost over a loop by hand?

    pytest suites/performance --gpus 8
    pytest suites/performance --gpus 4 --subject path/to/my_trainer.py --launches 10
    pytest suites/performance --benchmark-json new.json --benchmark-compare

One test is one cell. Each of its launches trains a warm-up and some rounds, between barriers at which all ranks wait
with idle devices. pytest-benchmark times the rounds; the ranks' own clocks time the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plumbline.pytest_plugin.cases import BenchmarkCase


def test_cell(plumbline_benchmark: BenchmarkCase, benchmark: Any) -> None:
    plumbline_benchmark.measure(benchmark)
