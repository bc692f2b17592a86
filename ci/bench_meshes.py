"""Measures how much longer a cell on a mesh takes than a ddp cell with as many ranks, from launch to verdict.

    python ci/bench_meshes.py                  # 2 x 2 ranks, 5 rounds
    python ci/bench_meshes.py --rounds 3 tp pp

All cells are launched in turns from one warm pool on simulated devices, so other work on the machine affects all of
them. A first round is not counted. Ratios compare cells of one round; the table has medians, and the range of the
ratio. `ep` is compared with a ddp cell of the workload `experts`, the others with one of `transformer`.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from bench_launch import timed

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch.pool import Pool

MESHES = ("fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "sp", "ep", "pp")
TOPOLOGY = Topology(2, 2)


def main() -> None:
    """Measure all backends in turns, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=MESHES)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [(backend, "experts" if backend == "ep" else "transformer") for backend in arguments.backends]
    rivals = dict.fromkeys(("ddp", workload) for _, workload in pairs)
    seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in (*rivals, *pairs)}
    pool = Pool("torch")
    try:
        assert pool.subjects  # warm
        for number in range(arguments.rounds + 1):
            for (backend, workload), own in seconds.items():
                took = sum(timed(pool, Cell("torch", workload, backend, TOPOLOGY, "32", "cpu")))
                if number:
                    own.append(took)
    finally:
        pool.close()
    print(f"| backend, {TOPOLOGY} | seconds | seconds of ddp | mesh ÷ ddp |\n|---|--:|--:|--:|")
    for backend, workload in pairs:
        mesh, ddp = seconds[backend, workload], seconds["ddp", workload]
        ratios = [own / rival for own, rival in zip(mesh, ddp, strict=True)]
        middle = statistics.median
        print(
            f"| {backend} | {middle(mesh):.2f} | {middle(ddp):.2f} "
            f"| {middle(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
