"""Reads the CPU, memory and GPUs of this machine, and their clocks and load. Initialises no device."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from plumbline.machine.software import command_output

_GPU_FIGURES = {
    "clocks.sm": "sm, MHz",
    "clocks.max.sm": "sm at most, MHz",
    "clocks.mem": "memory, MHz",
    "utilization.gpu": "busy, %",
    "memory.used": "memory in use, MiB",
}
"""The figures of each GPU, by nvidia-smi's names."""


def cpu_model() -> str | None:
    fields = (line.partition(":") for line in (_text("/proc/cpuinfo") or "").splitlines())
    model = next((value.strip() for field, _, value in fields if field.strip() == "model name"), None)
    return model or platform.processor() or platform.machine() or None


def cpu_governor() -> str | None:
    return _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def usable_cores() -> int | None:
    """Return how many cores this process may use, according to its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = (_text("/sys/fs/cgroup/cpu.max") or "").split()
        return min(cores or 1, max(1, int(quota) // int(period)))
    except (ValueError, ZeroDivisionError):  # no cgroup v2, or "max": no quota
        return cores


def memory_left() -> int:
    """Return how many bytes further processes can use, within the machine's memory and the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = cgroup_number("memory.max"), cgroup_number("memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def cgroup_number(name: str) -> int | None:
    text = _text(f"/sys/fs/cgroup/{name}")
    return int(text) if text and text.isdecimal() else None  # "max": no limit


def clocks_and_load() -> dict[str, float]:
    """Return clocks and load by name and unit. They can change a measurement."""
    found: dict[str, float] = {}
    with suppress(OSError, NotImplementedError):  # virtual machines may not report it
        if clock := psutil.cpu_freq():
            found["cpu, MHz"] = clock.current
    if hasattr(os, "getloadavg"):
        found["load average over 1 min"] = round(os.getloadavg()[0], 2)
    for number, row in enumerate(gpu_rows(*_GPU_FIGURES)):
        for name, value in zip(_GPU_FIGURES.values(), row, strict=True):
            if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", value):
                found[f"gpu {number}: {name}"] = float(value)
    return found


def gpu_rows(*names: str) -> list[list[str]]:
    """Return the properties ``names`` (in nvidia-smi's terms) of each GPU."""
    output = command_output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = [[value.strip() for value in line.rsplit(",", len(names) - 1)] for line in (output or "").splitlines()]
    return rows if all(len(row) == len(names) for row in rows) else []


def _text(file: str) -> str | None:
    try:
        return Path(file).read_text(errors="replace").strip() or None
    except OSError:
        return None


_PROBE = """
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.1:
    pass
print((time.monotonic() - began) / (time.process_time() - used))
"""


def slowdown(processes: int) -> float:
    """Return the ratio of wall time to CPU time of a computation, in the slowest of ``processes`` processes."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(process.communicate()[0] or 1) for process in running)


def cpu_seconds_of_others() -> float:
    """Return the CPU time, in seconds, of this process's other threads and of its running descendants."""
    process, calling = psutil.Process(), threading.get_native_id()
    seconds = sum(one.user_time + one.system_time for one in process.threads() if one.id != calling)
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            seconds += sum(child.cpu_times()[:2])
    return float(seconds)
