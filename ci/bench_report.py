"""Does the time of writing a report grow faster than the number of its cells?

    python ci/bench_report.py [--cells 125 250 500 1000] [--rounds 3]

Prints the processor time a cell of each number of cells, as a ratio to that of the first, for runs in which every cell
passes and in which every cell fails. Exits with 1 where a cell of the largest run takes more than twice as long.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.topology import Topology
from harness.machine.fingerprint import Fingerprint
from harness.report.formats import write_report
from harness.results.header_footer import Footer, Header
from harness.results.records import Result
from harness.results.run_writer import RunWriter

FINDINGS = 10
LARGEST_RATIO = 2.0


def main() -> int:
    """Measure each kind of run, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[125, 250, 500, 1000], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    print(f"| outcome | {' | '.join(f'{count} cells' for count in options.cells)} |")
    print(f"|---|{'--:|' * len(options.cells)}")
    worst = 0.0
    for outcome in (Outcome.PASSED, Outcome.FAILED):
        with tempfile.TemporaryDirectory() as folder:
            runs = [write_run(Path(folder), count, outcome) for count in options.cells]
            write_report(runs[0])  # imports, and the compilation of templates
            times = [min(cpu_seconds(run) for _ in range(options.rounds)) for run in runs]
        per_cell = [seconds / count for seconds, count in zip(times, options.cells, strict=True)]
        ratios = [one / per_cell[0] for one in per_cell]
        worst = max(worst, ratios[-1])
        print(f"| {outcome.value} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return int(worst > LARGEST_RATIO)


def cpu_seconds(run: Path) -> float:
    """Return the processor time of writing the report of a run."""
    begun = time.process_time()
    write_report(run)
    return time.process_time() - begun


def write_run(folder: Path, count: int, outcome: Outcome) -> Path:
    """Write a run of ``count`` cells whose findings all have this outcome, and return its folder."""
    topologies = [Topology(1, gpus) for gpus in (1, 2, 3, 4, 8)]
    cells = [
        Cell("reference", f"w{number // len(topologies)}", "ddp", topologies[number % len(topologies)], "32", "cpu")
        for number in range(count)
    ]
    findings = [Finding(f"check{place}", outcome, "m" * 300, error_x_noise=3.0, step=0) for place in range(FINDINGS)]
    header = Header.of(cells, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = [Result.of(cell, finding, f"pytest -k {cell.id}", 0.4) for cell in cells for finding in findings]
    with RunWriter(folder, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, 0))
    return writer.path


if __name__ == "__main__":
    sys.exit(main())
