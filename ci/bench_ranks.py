"""Measures how much faster a test with ``@pytest.mark.ranks`` is than one of torch's, which spawns its ranks.

    python ci/bench_ranks.py                          # 2, 4 and 8 ranks, 5 rounds
    python ci/bench_ranks.py --ranks 2 8 --rounds 3

Both kinds run the same body (``ci/bench_ranks/ddp.py``) in one pytest process, in turns, so other work on the machine
affects both. A test's seconds include set-up, call and tear-down; a first round is not counted. Ratios compare tests of
one round; the table has the medians, and the range of the ratio. Exits with 1 if a test failed, or if the median ratio
is below the promised 20 with 2 ranks, or 30 with 8. Needs `pip install expecttest`, as torch's test cases do.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).with_suffix("")
PROMISED = {2: 20.0, 8: 30.0}


@dataclass
class Durations:
    """A pytest plugin that collects each test's seconds by its id, and whether all tests passed."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a phase."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed += f"{report.nodeid}: {report.longreprtext}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's test cases need expecttest: pip install expecttest")
    print("| ranks | spawned, s | marked, s | ratio | smallest | largest |")
    print("| --: | --: | --: | --: | --: | --: |", flush=True)
    slow, said = False, []
    for ranks in options.ranks:
        rounds = [measure(ranks) for _ in range(options.rounds + 1)][1:]
        ratios = [spawned / marked for spawned, marked in rounds]
        spawned, marked = (statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(ratios)
        slow |= ratio < PROMISED.get(ranks, 0.0)
        row = (f"{spawned:.2f}", f"{marked:.3f}", f"× {ratio:.0f}", f"× {min(ratios):.0f}", f"× {max(ratios):.0f}")
        print(f"| {ranks} | {' | '.join(row)} |", flush=True)
        said.append(f"× {ratio:.0f} with {ranks} ranks")
    print(f"In all: {', '.join(said)}")
    return int(slow)


def measure(ranks: int) -> tuple[float, float]:
    """Return the seconds of the spawned test and of the marked test, run one after the other."""
    tests = [f"{TESTS}/test_spawned.py::Test{ranks}", f"{TESTS}/test_marked.py::test_marked[{ranks}]"]
    durations = Durations()
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    pytest.main([f"--rootdir={TESTS}", "-c", "/dev/null", *quiet, *tests], plugins=[durations])
    if durations.failed or len(durations.seconds) != 2:
        sys.exit(durations.failed or "a test is missing")
    spawned, marked = durations.seconds.values()
    return spawned, marked


if __name__ == "__main__":
    sys.exit(main())
