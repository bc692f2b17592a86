"""Trains right trainers repeatedly: no hang, no leak, no false alarm."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fault_lane.cells import RIGHT, train
from fault_lane.left import Present
from plumbline.core.outcome import Outcome
from plumbline.launch.pool import Pool

LIMIT = 60.0


@dataclass(frozen=True)
class Reading:
    """Counts after a number of launches, and resident memory in MiB of this process and of the server.

    ``kept`` is this process's memory after the allocator has released its free memory. Fragmentation leaves holes,
    which grow with time up to a limit.
    """

    launches: int
    seconds: float
    processes: int
    descriptors: int
    server_descriptors: int
    shared_memory: int
    folders: int
    memory: float
    kept: float
    server_memory: float


@dataclass(frozen=True)
class Soak:
    """The readings of a whole soak, its longest launch in seconds, and what went wrong."""

    readings: tuple[Reading, ...]
    longest: float
    alarms: tuple[str, ...]


def soak(launches: int, temporary: Path, say: Callable[[Reading], None], every: int = 100) -> Soak:
    """Train a right cell with two ranks ``launches`` times on one pool, and take readings in between."""
    readings: list[Reading] = []
    alarms: list[str] = []
    longest, started = 0.0, time.monotonic()
    pool = Pool(str(RIGHT))
    try:
        for number in range(1, launches + 1):
            folder = temporary / "soak"
            ended = train(pool, "trains", folder, limit=LIMIT)
            longest = max(longest, ended.trace.seconds or LIMIT)
            if ended.outcome is not Outcome.PASSED:
                alarms.append(f"launch {number}: {ended.outcome.value}: {ended.message[:300]}")
            shutil.rmtree(folder)
            if number % every == 0 or number in (1, launches):
                readings.append(_reading(number, time.monotonic() - started, pool, temporary))
                say(readings[-1])
    finally:
        pool.close()
    return Soak(tuple(readings), longest, tuple(alarms))


def _reading(launches: int, seconds: float, pool: Pool, temporary: Path) -> Reading:
    present = Present.now(temporary)
    server = pool.server
    return Reading(
        launches,
        round(seconds, 1),
        len(present.processes),
        present.descriptors,
        len(os.listdir(f"/proc/{server}/fd")),
        len(present.shared_memory),
        len(present.folders),
        _memory(os.getpid()),
        _kept(),
        _memory(server),
    )


def _kept() -> float:
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # not all C libraries have it
        trim(0)
    return _memory(os.getpid())


def _memory(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 1)
