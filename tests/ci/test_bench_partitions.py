"""The table of partitions: ours is optimal, nothing beats the best, and libraries are really called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"
LIBRARY = """
import json, sys
cases = json.load(sys.stdin)
print("what a library says when it is imported")
print(json.dumps(["1.2.3", [[0, *range(len(w) - k + 1, len(w)), len(w)] for w, k in cases]]))
"""


@pytest.fixture(scope="module")
def bench(program):
    return program(CI / "bench_partitions.py")


@pytest.fixture
def cases(bench, monkeypatch):
    monkeypatch.setattr(bench, "CASES", 24)
    return bench.random_cases()


def rows_of(page):
    """Return the cells of each table's rows, by the first cell."""
    rows = {}
    for line in page.splitlines():
        if line.startswith("| ") and "---" not in line:
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(name, []).append(cells)
    return rows


def test_ours_is_optimal_in_all_cases_and_within_every_limit(bench, cases):
    equal = [bench.equal_counts(costs, case.devices) for case in cases for costs in [bench.by_time(case)]]
    page = bench.report(
        cases,
        {
            "Plumbline": ([bench.ours(case) for case in cases], [bench.ours(case, by_memory=True) for case in cases]),
            "equal counts": (equal, equal),
        },
    )
    rows = rows_of(page)
    whole, of_kinds, limited = rows["Plumbline"]
    assert whole == ["24 of 24", "× 1.00", "× 1.000"] * 2
    assert of_kinds == ["100%, × 1.00"] * len(bench.KINDS)
    assert limited == ["24 of 24", "24 of 24"]
    assert rows["equal counts"][0][0] != "24 of 24"  # otherwise, the cases are too easy


def test_no_partition_is_better_than_the_best(bench, cases):
    for case in cases:
        assert bench.ours(case) in list(case.every_partition())
        assert case.slowest(bench.ours(case)) == pytest.approx(min(map(case.slowest, case.every_partition())))
        equal = bench.equal_counts(bench.by_time(case), case.devices)
        assert case.slowest(bench.ours(case)) <= case.slowest(equal) * bench.ROUNDING
        assert case.peak(bench.ours(case, by_memory=True)) <= case.peak(equal)


def test_a_library_is_asked_in_its_interpreter(bench):
    questions = [([1.0, 2.0, 3.0, 4.0], 2), ([1.0, 2.0, 3.0], 3)]
    assert bench.in_interpreter(sys.executable, LIBRARY, questions) == ("1.2.3", [[0, 3, 4], [0, 1, 2, 3]])
    with pytest.raises(SystemExit, match="No module named 'nosuchlibrary'"):
        bench.in_interpreter(sys.executable, "import nosuchlibrary", questions)
