"""Measures the same cells with and without the harness, in turns: the figures must agree.

    python ci/speed_by_hand.py                     # the suite's own loop, three workloads, on one device and on two
    python ci/speed_by_hand.py --launches 10 --workloads perf-gpt

By hand means: processes of torch.multiprocessing, a loop as in torch's tutorial, and one clock around all steps after
the warm-up. Only the model, the data and the number of steps are the workload's. The subject is a plain loop too, the
suite's yardstick; otherwise both measurements could be right and differ. Launches of the harness and by hand take
turns, because other work slows the machine at times. A process that trains alone uses the same core for both, because
cores may differ in speed. Float32, simulated devices. Exits with 1 if the ratio's interval (95 %, over
launches) does not contain 1.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.benchmark.measurements import measurements
from plumbline.benchmark.timed_launch import LaunchSample, TimedLaunch
from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.statistics.intervals import FigureInterval, figure_interval
from plumbline.workloads import PERFORMANCE

YARDSTICK = str(Path(__file__).parents[1] / "suites" / "performance" / "yardsticks.py")


def main() -> int:
    """Measure each cell both ways and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", default=YARDSTICK)
    parser.add_argument("--launches", type=int, default=7)
    parser.add_argument("--workloads", default="perf-mlp,perf-resnet,perf-gpt")
    asked = parser.parse_args()
    with closing(Pool(asked.subject)) as pool:
        name = pool.subjects[0]["name"]
    cells = [
        Cell(name, workload, backend, Topology(1, gpus), "32", "cpu")
        for workload in asked.workloads.split(",")
        for backend, gpus in (("none", 1), ("ddp", 2))
    ]
    print(f"{'cell':32} {'harness: samples/s (95 %)':>32} {'by hand: samples/s (95 %)':>32} {'ratio (95 %)':>24}")
    missed = [cell.id for cell in cells if not agrees(asked.subject, cell, asked.launches)]
    print(f"{len(cells) - len(missed)} of {len(cells)} agree" + (f"; not: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


def agrees(subject: str, cell: Cell, launches: int) -> bool:
    """Print a cell's figures; return whether their ratio may be 1."""
    with on_cores(1 if cell.processes == 1 else len(os.sched_getaffinity(0))):
        return agrees_here(subject, cell, launches)


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Pin this process, and those that it starts meanwhile, to ``number`` cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def agrees_here(subject: str, cell: Cell, launches: int) -> bool:
    """Measure a cell both ways, in turns."""
    measured: list[LaunchSample] = []
    by_hand: list[float] = []
    for number in range(launches):
        for turn in (0, 1) if number % 2 else (1, 0):
            if turn:
                measured.append(by_harness(subject, cell))
            else:
                by_hand.append(launch(cell.workload, cell.topology.devices))
    (figure,) = (one for one in measurements(cell, measured, "") if one.metric == "throughput")
    ratio = figure_interval([hand / own for hand, own in zip(by_hand, figure.samples, strict=True)])
    both = [told(figure_interval(samples)) for samples in (figure.samples, by_hand)]
    print(f"{cell.id:32} {both[0]:>32} {both[1]:>32} {told(ratio):>24}", flush=True)
    return ratio.low <= 1 <= ratio.high


def by_harness(subject: str, cell: Cell) -> LaunchSample:
    """Return one launch on a server of its own, like suites/performance, without a hand-written loop beside it."""
    with tempfile.TemporaryDirectory() as folder, closing(Pool(subject)) as pool:
        pool.wait_until_idle()
        own = Path(folder, "launch")
        own.mkdir()
        with closing(TimedLaunch.begin(pool, cell, own, Settings())) as group:
            for _ in range(PERFORMANCE[cell.workload].rounds):
                group.round()
            group.profile()
            return LaunchSample(group.end())


def told(one: FigureInterval) -> str:
    """Format a figure with its bounds."""
    return f"{one.value:,.4g} ({one.low:,.4g} … {one.high:,.4g})"


def launch(workload: str, world: int) -> float:
    """Return one launch's samples per second: all training samples over the slowest process's time."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(train, (workload, world, folder), nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
        told = [tuple(map(float, file.read_text().split())) for file in Path(folder).glob("rank-*")]
    return sum(samples for samples, _ in told) / max(seconds for _, seconds in told)


def train(rank: int, workload: str, world: int, folder: str) -> None:
    """Train as one process, and write down samples and seconds."""
    torch.set_num_threads(1)
    allocator = ctypes.CDLL(None)  # make glibc keep freed memory, as ranks do
    allocator.mallopt(-1, 2**31 - 1)
    allocator.mallopt(-3, 2**25)
    gc.collect()
    gc.freeze()  # a full garbage collection, once in thousands of steps, would distort a few dozen steps
    problem = PERFORMANCE[workload]
    extent = problem.extent(world)
    model = bare = problem.model()
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
        model = DistributedDataParallel(bare)
    dataset = problem.dataset(world)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world, rank)
    loader = DataLoader(dataset, batch_size=problem.global_batch_size(world) // world, sampler=sampler)
    optimizer = problem.optimizer(bare.parameters())
    samples, begun = 0, 0.0
    for number, batch in enumerate(loader):
        torch.autograd.backward(problem.loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
        if number + 1 == extent.warmup:
            if world > 1:
                dist.barrier()
            begun, samples = time.perf_counter(), 0
        else:
            samples += len(batch["index"])
        if number + 1 == extent.warmup + extent.rounds * extent.steps:
            Path(folder, f"rank-{rank}").write_text(f"{samples} {time.perf_counter() - begun}")
            break
    if world > 1:
        dist.barrier()
    os._exit(0)  # a DDP object that outlives its process group may hang


if __name__ == "__main__":
    sys.exit(main())
