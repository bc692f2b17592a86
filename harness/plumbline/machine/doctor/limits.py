"""Probes of what a run may use of this system: CPUs, memory, processes, files, clocks, disk."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from plumbline.machine.doctor import ProbeResult
from plumbline.machine.hardware import cgroup_number, cpu_governor, memory_left, slowdown, usable_cores

GIB = 1 << 30
CONTAINER_SHM = 64 << 20
"""Docker's default, in bytes: too little for NCCL and for DataLoader workers."""

FEWEST_FILES = 1024
FEWEST_PROCESSES = 1024
LEAST_MEMORY = 2 * GIB
LEAST_DISK = GIB
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
BUSY = 1.5
"""The machine is busy if a computation takes this many times its CPU time."""

MOST_LOAD_PROCESSES = 4


def load() -> ProbeResult:
    cores = usable_cores() or 1
    factor = slowdown(min(cores, MOST_LOAD_PROCESSES))
    found = f"work takes {factor:.1f} × its CPU time"
    with suppress(OSError):
        found += f"; load average {os.getloadavg()[0]:.1f} on {cores} cores"
    if factor < BUSY:
        return ProbeResult(found)
    advice = "the machine is busy: runs take longer (see --time-limit), and their speed figures are unreliable"
    return ProbeResult(found, advice, is_note=True)


def shared_memory() -> Iterator[ProbeResult]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        yield ProbeResult("no /dev/shm on this system")
        return
    found = f"/dev/shm: {_size(usage.free)} of {_size(usage.total)} free"
    if usage.total <= CONTAINER_SHM:
        yield ProbeResult(found, "give the container more: docker run --shm-size=1g, or --ipc=host")
    elif usage.free < CONTAINER_SHM:
        yield ProbeResult(found, "it is nearly full: look for files left in /dev/shm")
    else:
        yield ProbeResult(found)


def limits() -> Iterator[ProbeResult]:
    files = _soft(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {FEWEST_FILES}" if files is not None and files < FEWEST_FILES else None
    yield ProbeResult(f"open files: {_number(files)}", advice)
    processes = [number for number in (_soft(resource.RLIMIT_NPROC), cgroup_number("pids.max")) if number is not None]
    few = bool(processes) and min(processes) < FEWEST_PROCESSES
    advice = f"ulimit -u {FEWEST_PROCESSES}; in a container --pids-limit" if few else None
    yield ProbeResult(f"processes and threads: {_number(min(processes, default=None))}", advice)
    locked = _soft(resource.RLIMIT_MEMLOCK)
    over_fabric = Path("/dev/infiniband").is_dir() and locked is not None
    advice = "ulimit -l unlimited: RDMA locks the memory that it sends from" if over_fabric else None
    yield ProbeResult(f"locked memory: {'unlimited' if locked is None else _size(locked)}", advice)


def cores() -> Iterator[ProbeResult]:
    usable, present = usable_cores() or 1, os.cpu_count() or 1
    governor = cpu_governor()
    found = f"{usable} of {present} cores" + (f", governor {governor}" if governor else "")
    if governor == "powersave":
        yield ProbeResult(found, "for comparable figures: cpupower frequency-set -g performance")
    else:
        yield ProbeResult(found)


def memory() -> Iterator[ProbeResult]:
    free = memory_left()
    advice = "end other processes, or use a smaller --gpus" if free < LEAST_MEMORY else None
    yield ProbeResult(f"{_size(free)} available", advice)


def clock() -> Iterator[ProbeResult]:
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        source = ""
    resolution = time.get_clock_info("perf_counter").resolution
    found = f"resolution {resolution * 1e9:.0f} ns" + (f", source {source}" if source else "")
    slow = source in SLOW_CLOCKS or resolution > 1e-6
    yield ProbeResult(
        found, "the clock is slow or coarse, so step times are inaccurate: change the clock source" if slow else None
    )
    if time.time() < Path(__file__).stat().st_mtime:
        yield ProbeResult(
            "the system time is earlier than Plumbline's own files", "set the clock: runs are named after the time"
        )


def disk(report_dir: Path) -> Iterator[ProbeResult]:
    place = next(folder for folder in (report_dir.absolute(), *report_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found = f"{_size(free)} free in {place}"
    if not (place.is_dir() and os.access(place, os.W_OK)):
        yield ProbeResult(found, "not writable: choose another folder with --report-dir")
    else:
        yield ProbeResult(found, "free some space: the traces of failed cells are kept" if free < LEAST_DISK else None)


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
