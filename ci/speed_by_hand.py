"""Does a run's throughput agree with a stopwatch held by hand? Measures its cells again, with none of the harness.

    pytest suites/performance --gpus 2 --subject torch && python ci/speed_by_hand.py reports/latest

For each cell of the backends `none` and `ddp` in float32 on simulated devices: processes of torch.multiprocessing, a
loop as torch's tutorial has it, one clock around all steps after the warm-up, as many launches as the run had. Only the
model, the data and the number of steps are those of the workload. The machine has to be as quiet as it was for the run,
and the trainer of the run should be a plain one. Exits with 1 where a difference is more than both figures' spread
explains (95 %).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness.measure.estimate import Estimate, estimate
from harness.store.records import Measurement
from harness.store.run import read_run
from harness.workloads import PERFORMANCE


def main() -> int:
    """Measure each cell of the run by hand and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = read_run(parser.parse_args().run)
    figures = [
        one
        for one in run.measurements
        if one.metric == "throughput"
        and one.backend in ("none", "ddp")
        and (one.precision, one.accelerator) == ("32", "cpu")
    ]
    print(f"{'cell':42} {'run: samples/s (95 %)':>32} {'by hand: samples/s (95 %)':>32} {'ratio':>8}")
    missed = [figure.cell for figure in figures if not agrees(figure)]
    print(f"{len(figures) - len(missed)} of {len(figures)} agree" + (f"; not: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


def agrees(figure: Measurement) -> bool:
    """Print a cell's figure beside that by hand; return whether their difference is within what both may err by."""
    by_hand = estimate([launch(figure.workload, figure.num_nodes * figure.gpus) for _ in figure.samples])
    run = estimate(figure.samples)
    print(f"{figure.cell:42} {told(run):>32} {told(by_hand):>32} {by_hand.value / run.value:>8.3f}", flush=True)
    middles = [math.log(one.low * one.high) / 2 for one in (run, by_hand)]
    halves = [math.log(one.high / one.low) / 2 for one in (run, by_hand)]
    return abs(middles[0] - middles[1]) <= math.hypot(*halves)


def told(one: Estimate) -> str:
    """Write a figure with its bounds."""
    return f"{one.value:,.5g} ({one.low:,.5g} … {one.high:,.5g})"


def launch(workload: str, world: int) -> float:
    """Return the samples a second of one launch: all that were trained on, over the slowest process's time."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(train, (workload, world, folder), nprocs=world, start_method="fork")
        told = [tuple(map(float, file.read_text().split())) for file in Path(folder).glob("rank-*")]
    return sum(samples for samples, _ in told) / max(seconds for _, seconds in told)


def train(rank: int, workload: str, world: int, folder: str) -> None:
    """Train as one process, and leave samples and seconds."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a walk through all that was imported, once in thousands of steps, is no part of a few dozen
    problem = PERFORMANCE[workload]
    extent = problem.extent(world)
    model = bare = problem.model()
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
        model = DistributedDataParallel(bare)
    dataset = problem.dataset(world)
    sampler = DistributedSampler(dataset, world, rank)
    loader = DataLoader(dataset, batch_size=problem.global_batch_size(world) // world, sampler=sampler)
    optimizer = problem.optimizer(bare.parameters())
    samples, begun = 0, 0.0
    for number, batch in enumerate(loader):
        problem.loss(model(batch), batch).backward()
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
