"""Measures the cost of bringing many ranks or nodes together: each part by itself, without a training.

    python ci/bench_rendezvous.py                   # 125, 250, 500 and 1000

Three parts, as median and range over a few runs: processes that join one launch's store and wait for all others; a
node's part of the rendezvous check with the given number of nodes (all on this machine, without a network); and the
bytes that the launcher sends to all nodes for one launch of the given number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.launch import this_machine
from plumbline.launch.pool import SERVER_ENVIRONMENT
from plumbline.launch.this_machine import new_store
from plumbline.worker.assignment import Assignment
from plumbline.worker.server import ConnectivityProbe, reach

_PORT = 5
"""The number of digits of a port."""

GPUS = 8
"""Devices per node."""


def main() -> None:
    """Measure each number in turn, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[125, 250, 500, 1000])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.update(SERVER_ENVIRONMENT)  # like ranks
    print(
        "| processes | meet in a store, s | descriptors of the store's process | reach as many nodes, s | sent, KiB |"
    )
    print("| --: | --: | --: | --: | --: |")
    for count in arguments.counts:
        met = [meet(count) for _ in range(arguments.runs)]
        reached = [reach_all(count) for _ in range(arguments.runs)]
        files = max(files for _, files in met)
        print(f"| {count} | {spread([s for s, _ in met])} | {files} | {spread(reached)} | {sent(count) / 1024:.0f} |")


def meet(count: int) -> tuple[float, int]:
    """Return the seconds from the store's start until all have met, and this process's descriptors then."""
    (wait, go), (heard, said) = os.pipe(), os.pipe()
    below = []
    for _ in range(count):  # before the store's thread starts: a child inherits its locks
        pid = os.fork()
        if not pid:
            try:
                join(int(os.read(wait, _PORT)), count, said)
            finally:
                os._exit(0)
        below.append(pid)
    os.close(said)
    store = new_store(this_machine.loopback())
    started = time.perf_counter()
    os.write(go, f"{store.port:0{_PORT}}".encode() * count)
    here = b""
    while len(here) < count and (more := os.read(heard, count)):
        here += more
    seconds, files = time.perf_counter() - started, len(os.listdir("/proc/self/fd"))
    store.set("end", "")
    for pid in below:
        os.waitpid(pid, 0)
    for descriptor in (wait, go, heard):
        os.close(descriptor)
    assert len(here) == count, f"{count - len(here)} of {count} did not join"
    return seconds, files


def join(port: int, count: int, said: int) -> None:
    """Join the store as a rank does, wait for all others, report this, and stay until the end."""
    patience = timedelta(seconds=120)
    mine = TCPStore(this_machine.loopback(), port, is_master=False, wait_for_workers=False, timeout=patience)
    if mine.add("arrived", 1) == count:
        mine.set("complete", "")
    mine.wait(["complete"])
    os.write(said, b".")
    mine.wait(["end"])


def reach_all(count: int) -> float:
    """Return the seconds in which one node reaches ``count`` others."""
    nodes = [ConnectivityProbe() for _ in range(count)]
    address = this_machine.loopback()
    ports = [node.answer({"command": "listen", "address": address})["port"] for node in nodes]
    started = time.perf_counter()
    failed = reach({str(number): (address, port) for number, port in enumerate(ports)}, 5.0)
    seconds = time.perf_counter() - started
    assert not failed, failed
    for node in nodes:
        node.close()
    return seconds


def sent(count: int) -> int:
    """Return the size of the assignments of ``ranks`` ranks in bytes."""
    cell = Cell("reference", "mlp", "ddp", Topology(max(1, count // GPUS), min(count, GPUS)), "32", "cpu")
    folder = "/a/folder/that/all/nodes/see/plumbline-run-00000000/cell-00000000"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    environment = {**this_machine.ELASTIC, **dict.fromkeys(names, "100"), "MASTER_ADDR": "10.100.100.100"}
    one = Assignment(
        1, cell, 100, "gloo", ("cpu",), environment, f"{folder}/rank-100.safetensors", f"{folder}/rank-100.log"
    )
    return count * len(json.dumps(one.to_json()))


def spread(values: list[float]) -> str:
    """Format median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} … {max(values):.3f})"


if __name__ == "__main__":
    main()
