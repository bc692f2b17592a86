"""Repeatedly launches trainers that destroy their process group, and counts hangs and leftovers.

    python ci/teardowns.py                                   # 300 launches each, of 2, 3 and 4 ranks
    python ci/teardowns.py --launches 20 --subject lightning

Needs Lightning, Accelerate and Ignite: `pip install -c constraints.txt -e '.[lightning,accelerate,ignite]'`. Prints a
table in Markdown. Exits with 1 if a launch timed out, hung or was not judged right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from fault_lane.left import MARK, Present, left_since

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.pool import Pool
from plumbline.workloads import find

SUBJECTS = Path(__file__).with_name("teardowns") / "subjects.py"
LIMIT = 60.0
"""Seconds for a launch. A launch that does not hang takes less than a tenth of this."""


def main() -> int:
    """Launch the selection; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=300, help="of each subject and number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--subject", action="append", help="one of the file's (repeatable; default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ[MARK] = "teardowns"
    launched = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(str(SUBJECTS))
        names = [declared["name"] for declared in pool.subjects]
        print(f"torch {torch.__version__}\n")
        print("| subject | ranks | launches | right | hung | timed out | other | left behind | seconds |")
        print("| --- | --: | --: | --: | --: | --: | --: | --- | --: |", flush=True)
        for name in options.subject or names:
            for ranks in options.ranks:
                launched += options.launches
                wrong += _row(pool, name, ranks, options.launches, Path(folder))
        pool.close()
    print(f"\nIn all: {launched} launches, {launched - wrong} of them right")
    return 1 if wrong else 0


def _row(pool: Pool, name: str, ranks: int, launches: int, folder: Path) -> int:
    """Print a row of the table; return the number of launches that were not right."""
    cell = Cell(name, "mlp", "ddp", Topology(1, ranks), "32", "cpu")
    launch(pool, cell, folder / "launch", Settings(LIMIT))  # a pool's own descriptors are not leftovers of a launch
    shutil.rmtree(folder / "launch")
    before, started = Present.now(folder), time.monotonic()
    right = hung = late = other = 0
    for _ in range(launches):
        trace = launch(pool, cell, folder / "launch", Settings(LIMIT))
        outcomes = {finding.outcome for finding in judge(TraceAnalysis(trace, find("mlp", None), cell))}
        if trace.hung:
            hung += 1
        elif outcomes == {Outcome.PASSED}:
            right += 1
        elif Outcome.TIMED_OUT in outcomes:
            late += 1
        else:
            other += 1
        shutil.rmtree(folder / "launch")
    left = left_since(before, folder)
    seconds = time.monotonic() - started
    print(
        f"| {name} | {ranks} | {launches} | {right} | {hung} | {late} | {other} | {left} | {seconds:.0f} |", flush=True
    )
    return launches - right


if __name__ == "__main__":
    sys.exit(main())
