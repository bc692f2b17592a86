"""How long does one warm ddp cell take, from launch to verdict?

    python ci/bench_launch.py            # 8, 32 and 96 ranks on simulated devices
    python ci/bench_launch.py 2 8 32

Prints seconds for launching and training (six steps of `mlp`, evidence on disk) and for judging, median and range
over a few runs. The pool is warm: its interpreter has torch imported, as in a run of more than one cell.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from harness.core.cell import Cell
from harness.core.outcome import worst
from harness.core.topology import Topology
from harness.judge.judge import judge
from harness.launch.local import launch
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.workloads import WORKLOADS


def main() -> None:
    """Time each number of ranks in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=[8, 32, 96])
    parser.add_argument("--subject", default="reference")
    parser.add_argument("--workload", default="mlp", choices=sorted(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pool = Pool(arguments.subject)
    try:
        name = pool.subjects[0]["name"]
        time_cell(pool, Cell(name, arguments.workload, "ddp", Topology(1, 2), "32", "cpu"))  # warms the judge
        print(f"{'ranks':>5}  {'launch + train, s':>24}  {'judge, s':>24}  {'together, s':>24}  verdict")
        for ranks in arguments.ranks:
            cell = Cell(name, arguments.workload, "ddp", Topology(1, ranks), "32", "cpu")
            timed = [time_cell(pool, cell) for _ in range(arguments.runs)]
            trained, judged = [t[0] for t in timed], [t[1] for t in timed]
            together = [a + b for a, b in zip(trained, judged, strict=True)]
            print(f"{ranks:>5}  {spread(trained):>24}  {spread(judged):>24}  {spread(together):>24}  {timed[-1][2]}")
    finally:
        pool.close()


def time_cell(pool: Pool, cell: Cell) -> tuple[float, float, str]:
    """Return seconds of training and of judging, and the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trace = launch(pool, cell, Path(folder), Settings(300))
        trained = time.perf_counter()
        findings = judge(trace, WORKLOADS[cell.workload], cell)
        return trained - started, time.perf_counter() - trained, worst(f.outcome for f in findings).value


def spread(values: list[float]) -> str:
    """Write median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


if __name__ == "__main__":
    main()
