"""Measures the phases of one warm ddp cell, and which of them grows faster than the number of ranks.

    python ci/bench_phases.py                # 2 to 96 ranks on simulated devices, nodes of 8
    python ci/bench_phases.py --unreduced    # without averaging gradients
    python ci/bench_phases.py --alone        # without a process group: Plumbline's part of a launch

Each phase ends when the last rank has finished it; seconds are medians over a few runs. `launched` is everything before
the first step: forking ranks, creating their process group, wrapping their models. The subject is at the end of this
file, and reports when each phase ended. `cpu` is the processor time of a rank, in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import subject

LEFT_OUT = "PLUMBLINE_BENCH_LEFT_OUT"

PHASES = ("launched", "forked", "process group", "DDP object", "trained", "evidence read", "cpu")


def main() -> None:
    """Measure each number of ranks in turn, and print Markdown."""
    from bench_launch import RANKS, exponents, topology

    from plumbline.core.cell import Cell
    from plumbline.launch.cell_launch import Settings, launch
    from plumbline.launch.pool import Pool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--runs", type=int, default=3)
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--unreduced", action="store_true", help="train without averaging, inside no_sync()")
    less.add_argument("--alone", action="store_true", help="train without a process group")
    arguments = parser.parse_args()
    os.environ[LEFT_OUT] = "averaging" if arguments.unreduced else "meeting" if arguments.alone else ""
    torch.set_num_threads(1)
    pool = Pool(__file__)
    rows = []
    assert pool.subjects  # warm
    try:
        for ranks in arguments.ranks:
            cell = Cell("says-when", "mlp", "ddp", topology(ranks), "32", "cpu")
            runs = []
            for _ in range(arguments.runs):
                with tempfile.TemporaryDirectory() as folder:
                    begun = time.time()
                    launch(pool, cell, Path(folder), Settings(300))
                    ended = time.time()
                    said = [times(Path(folder) / f"rank-{rank}.log") for rank in range(ranks)]
                *ends, cpu = (max(phase) for phase in zip(*said, strict=True))
                forked, grouped, wrapped, *rest = numpy.diff([begun, *ends, ended])
                runs.append([forked + grouped + wrapped, forked, grouped, wrapped, *rest, cpu])
            rows.append([statistics.median(phase) for phase in zip(*runs, strict=True)])
    finally:
        pool.close()
    print(f"| ranks | {' | '.join(PHASES)} |\n|{' --: |' * (len(PHASES) + 1)}")
    for ranks, row in zip(arguments.ranks, rows, strict=True):
        print(f"| {ranks} | {' | '.join(f'{seconds:.2f}' for seconds in row)} |")
    print("\n".join(exponents(arguments.ranks, list(zip(*rows, strict=True)))))


def times(log: Path) -> list[float]:
    """Return a rank's report: the end of each phase, then its processor time."""
    line = next(line for line in log.read_text().splitlines() if line.startswith("phases "))
    return [float(word) for word in line.split()[1:]]


@subject(name="says-when", backends=["ddp"])
def train(job: Any) -> None:
    """Train as usual, and report the end of each phase."""
    left_out = os.environ[LEFT_OUT]
    ends = [time.time()]
    if left_out != "meeting":
        torch.distributed.init_process_group(job.comm)
    ends.append(time.time())
    model = job.model()
    if left_out != "meeting":
        model = DistributedDataParallel(model)
    ends.append(time.time())
    optimizer = job.optimizer(model.parameters())
    sampler: DistributedSampler[Any] = DistributedSampler(
        job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed
    )
    with model.no_sync() if left_out == "averaging" else nullcontext():
        for epoch in range(job.epochs):
            sampler.set_epoch(epoch)
            for batch in DataLoader(job.dataset, job.batch_size, sampler=sampler):
                job.loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    ends.append(time.time())
    print("phases", *ends, time.process_time(), flush=True)


if __name__ == "__main__":
    main()
