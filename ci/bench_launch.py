"""Measures how a warm ddp cell's time, memory and connections grow with its ranks, from launch to verdict.

    python ci/bench_launch.py                            # 2 to 96 ranks on simulated devices, nodes of 8
    python ci/bench_launch.py 64 96 --figures PIECES     # a piece; the table is that of all pieces in the file

Seconds are the time to launch and train (six steps of `mlp`, evidence on disk) and to judge, as median and range over a
few runs. The pool is warm: its interpreter has imported torch, as in any run with more than one cell. Descriptors are
the maximum, and memory is the median, of many samples during one more launch, which is not timed. PSS divides shared
pages among processes, so a sum of PSS is what the machine really holds; the ranks' memory is that of eight of them,
times their number. An exponent is the slope of the least-squares line through the logarithms: 1 is linear growth, 2 is
quadratic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from plumbline.core.cell import Cell
from plumbline.core.outcome import worst
from plumbline.core.topology import Topology
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.pool import Pool
from plumbline.workloads import WORKLOADS

RANKS = (2, 4, 8, 16, 32, 64, 96)
GPUS = 8
"""Devices per simulated node."""

_SAMPLE = 8
"""The number of ranks whose memory is sampled: sampling all of them takes as long as the launch."""

FROM = 16
"""A second exponent is fitted from this number of ranks on, where constant costs matter less."""

COLUMNS = {
    "launch + train, s": "trained",
    "judge, s": "judged",
    "parent, MiB": "parent",
    "server + ranks, MiB": "ranks",
    "evidence, KiB": "evidence",
    "descriptors of the parent": "parent_files",
    "descriptors of the server": "server_files",
    "descriptors of a rank": "rank_files",
    "threads of a rank": "rank_threads",
}


def main() -> None:
    """Measure each number of ranks in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--subject", default="reference")
    parser.add_argument("--workload", default="mlp", choices=sorted(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--figures", type=Path, help="file to which the figures are added, and from which they are read"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    if arguments.figures and arguments.figures.exists():
        figures = [json.loads(line) for line in arguments.figures.read_text().splitlines()]
    pool = Pool(arguments.subject)
    try:
        name = pool.subjects[0]["name"]
        timed(pool, Cell(name, arguments.workload, "ddp", Topology(1, 2), "32", "cpu"))  # warms the judge
        for ranks in arguments.ranks:
            cell = Cell(name, arguments.workload, "ddp", topology(ranks), "32", "cpu")
            figures.append(figures_of(pool, cell, arguments.runs))
            if arguments.figures:
                arguments.figures.write_text("".join(f"{json.dumps(one)}\n" for one in figures))
    finally:
        pool.close()
    print(table(sorted(figures, key=lambda one: one["processes"])))


def topology(ranks: int) -> Topology:
    """Return full nodes, or a single one that is not full."""
    return Topology(ranks // GPUS, GPUS) if ranks > GPUS else Topology(1, ranks)


def figures_of(pool: Pool, cell: Cell, runs: int) -> dict[str, Any]:
    """Return a cell's figures: lists of seconds, and single numbers for the rest."""
    times = [timed(pool, cell) for _ in range(runs)]
    with tempfile.TemporaryDirectory() as folder, Watcher(pool.server, cell.processes) as watcher:
        trace = launch(pool, cell, Path(folder), Settings(300))
        outcome = worst(
            finding.outcome for finding in judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))
        ).value
        evidence = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1024
        parent = status(os.getpid(), "VmRSS") / 1024
        parent_files = len(os.listdir("/proc/self/fd"))
    return {
        "processes": cell.processes,
        "trained": [trained for trained, _ in times],
        "judged": [judged for _, judged in times],
        "evidence": evidence,
        "parent": parent,
        "parent_files": parent_files,
        **watcher.largest,
        "ranks": watcher.memory,
        "steps": len(trace.ranks[0].steps),
        "outcome": outcome,
    }


def timed(pool: Pool, cell: Cell) -> tuple[float, float]:
    """Return the seconds of training and of judging."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trace = launch(pool, cell, Path(folder), Settings(300))
        trained = time.perf_counter()
        judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))
        return trained - started, time.perf_counter() - trained


class Watcher:
    """Samples a fork server and its ranks repeatedly, and keeps the maxima."""

    def __init__(self, server: int, count: int) -> None:
        self.largest = {"server_files": 0, "rank_files": 0, "rank_threads": 0}
        self._count = count
        self._memory: list[float] = []
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def memory(self) -> float:
        """The memory of the server and of all ranks in MiB: medians over samples in which all were running."""
        return statistics.median(self._memory)

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            below = [int(pid) for pid in Path(f"/proc/{self._server}/task/{self._server}/children").read_text().split()]
            seen = {"server_files": len(os.listdir(f"/proc/{self._server}/fd"))}
            for pid in below[:: max(1, len(below) - 1)]:  # the first and the last ranks
                with suppress(OSError, StopIteration):  # the process has just ended
                    seen["rank_files"] = max(seen.get("rank_files", 0), len(os.listdir(f"/proc/{pid}/fd")))
                    seen["rank_threads"] = max(seen.get("rank_threads", 0), status(pid, "Threads"))
            found = []
            for pid in below[:: max(1, len(below) // _SAMPLE)]:
                with suppress(OSError, IndexError, StopIteration):
                    found.append(pss(pid) / 1024)
            if found and len(below) == self._count:
                memory = pss(self._server) / 1024 + statistics.fmean(found) * len(below)
                self._memory.append(memory)
            self.largest = {name: max(value, seen.get(name, 0)) for name, value in self.largest.items()}


def pss(pid: int) -> int:
    """Return a process's memory in KiB; shared pages count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def status(pid: int, name: str) -> int:
    """Return a number from a process's status file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as Markdown: a row per number of ranks, and exponents below."""
    lines = [f"| ranks | {' | '.join(COLUMNS)} | verdict |", f"|{' --: |' * (len(COLUMNS) + 1)} --- |"]
    for one in figures:
        lines.append(
            f"| {one['processes']} | {' | '.join(written(one[key]) for key in COLUMNS.values())} | {one['outcome']} |"
        )
    ranks = [one["processes"] for one in figures]
    lines += exponents(ranks, [[middle(one[key]) for one in figures] for key in COLUMNS.values()])
    return "\n".join(lines)


def exponents(ranks: Sequence[int], columns: Sequence[Sequence[float]]) -> list[str]:
    """Return rows with the slope of each column's logarithms over those of the number of ranks."""
    rows = []
    for least in (0, FROM):
        among = [index for index, number in enumerate(ranks) if number >= least]
        if len(among) > 1:
            over = numpy.log([ranks[place] for place in among])
            slopes = [numpy.polyfit(over, numpy.log([column[place] for place in among]), 1)[0] for column in columns]
            first, last = ranks[among[0]], ranks[among[-1]]
            rows.append(f"| exponent, {first} … {last} | {' | '.join(f'{slope:.2f}' for slope in slopes)} |")
    return rows


def middle(value: float | list[float]) -> float:
    """Return a number, or the median of several."""
    return statistics.median(value) if isinstance(value, list) else value


def written(value: float | list[float]) -> str:
    """Format a number, or the median and range of several."""
    if isinstance(value, list):
        return f"{statistics.median(value):.2f} ({min(value):.2f} … {max(value):.2f})"
    return f"{value:.0f}"


if __name__ == "__main__":
    main()
