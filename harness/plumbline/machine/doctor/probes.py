"""All probes by name, the probes of this machine's resources, and a function that runs all probes in parallel."""

from __future__ import annotations

import os
import queue
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from plumbline.machine.doctor.installations import (
    ProbeResult,
    devices,
    links,
    ports,
    python,
    ranks,
    subjects,
    torch_build,
)
from plumbline.machine.hardware import (
    cgroup_number,
    cpu_governor,
    cpu_seconds_of_others,
    memory_left,
    slowdown,
    usable_cores,
)

GIB = 1 << 30
CONTAINER_SHM = 64 << 20  # Docker's default, in bytes: too little for NCCL and for DataLoader workers
FEWEST_FILES = 1024
FEWEST_PROCESSES = 1024
LEAST_MEMORY = 2 * GIB
LEAST_DISK = GIB
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
BUSY = 1.5  # the machine is busy if a computation takes this many times its CPU time
MOST_LOAD_PROCESSES = 4


def load() -> ProbeResult:
    cores = usable_cores() or 1
    factor = slowdown(min(cores, MOST_LOAD_PROCESSES))
    found = f"computations take {factor:.1f} × their CPU time (1.0 on an idle machine)"
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
    advice = "it is nearly full: look for files left in /dev/shm" if usage.free < CONTAINER_SHM else None
    if usage.total <= CONTAINER_SHM:
        advice = "give the container more: docker run --shm-size=1g, or --ipc=host"
    yield ProbeResult(found, advice)


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
    advice = "for comparable figures: cpupower frequency-set -g performance" if governor == "powersave" else None
    yield ProbeResult(found, advice)


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
    advice = "free some space: the traces of failed cells are kept" if free < LEAST_DISK else None
    if not (place.is_dir() and os.access(place, os.W_OK)):
        advice = "not writable: choose another folder with --report-dir"
    yield ProbeResult(found, advice)


def _soft(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


IDLE_LIMIT_S = 30.0  # a probe without a result hangs if the probes have used no CPU time for this long
TOTAL_LIMIT_S = 600.0  # for all probes together, however much CPU time they use
_LEAST_WORK_S = 0.02  # CPU time that counts as work: two ticks of the kernel's clock
_POLL_S = 0.2
Probe = Callable[[], Iterator[ProbeResult]]


def probes(report_dir: Path) -> dict[str, Probe]:
    """Return the probes by name, in the order of their results. The load is measured now, before any probe runs."""
    measured = load()
    return {
        "load": lambda: iter([measured]),
        "python": python,
        "torch": torch_build,
        "devices": devices,
        "links": links,
        "ranks": ranks,
        "ports": ports,
        "shared memory": shared_memory,
        "limits": limits,
        "cores": cores,
        "memory": memory,
        "clock": clock,
        "disk": lambda: disk(report_dir),
        "subjects": subjects,
    }


def run_probes(
    named: Mapping[str, Probe], quiet: float = IDLE_LIMIT_S, longest: float = TOTAL_LIMIT_S
) -> Iterator[tuple[str, ProbeResult]]:
    """Run all probes at once. Yield their results in order, with the names of the probes, as they arrive.

    If a probe raises, the error becomes a result. A probe counts as hung if it has no result while all probes together
    have used no CPU time for ``quiet`` seconds. After ``longest`` seconds, this function no longer waits for results.
    """
    activity = _Activity()
    for name, results in [(name, _start(probe)) for name, probe in named.items()]:
        while True:
            try:
                result = results.get(timeout=min(_POLL_S, quiet))
            except queue.Empty:
                if (idle := activity.idle()) > quiet:
                    found = f"no answer, and no CPU time used for {idle:.0f} s"
                    yield name, ProbeResult(found, "it hangs: a device, a file system or the network does not respond")
                    break
                if activity.elapsed() > longest:
                    found = f"no answer within {longest:.0f} s"
                    yield name, ProbeResult(found, "try again when the machine is less busy")
                    break
                continue
            if result is None:
                break
            yield name, result


class _Activity:
    def __init__(self) -> None:
        self._begun = self._since = time.monotonic()
        self._used = cpu_seconds_of_others()

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def idle(self) -> float:
        used = cpu_seconds_of_others()
        if abs(used - self._used) > _LEAST_WORK_S:  # it decreases when a process ends
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since


def _start(probe: Probe) -> queue.SimpleQueue[ProbeResult | None]:
    results: queue.SimpleQueue[ProbeResult | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for result in probe():
                results.put(result)
        except Exception as error:  # the other probes go on, whatever is wrong with the machine
            results.put(
                ProbeResult(f"the probe failed ({type(error).__name__}: {error})", "check what the error names")
            )
        results.put(None)

    threading.Thread(target=run, daemon=True).start()
    return results
