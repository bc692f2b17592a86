"""What this machine is and is busy with: its processor, its clocks, its load, and the GPUs in it.

Best effort throughout: what cannot be found out is left out, and CUDA is never touched.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

_SECONDS_FOR_A_QUESTION = 10.0
_CPUINFO = Path("/proc/cpuinfo")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

_GPU_FIGURES = {
    "clocks.sm": "sm, MHz",
    "clocks.max.sm": "sm at most, MHz",
    "clocks.mem": "memory, MHz",
    "utilization.gpu": "busy, %",
    "memory.used": "memory in use, MiB",
}


def command_output(*command: str) -> str | None:
    """Return what ``command`` prints, or None if it is not there, fails, or takes too long."""
    # A git hook sets GIT_DIR and GIT_INDEX_FILE, which would make git answer about another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_SECONDS_FOR_A_QUESTION,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str | None:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine() or None


def usable_cores() -> int | None:
    """Return the cores this process may use, after affinity and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores or 1, max(1, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or "max": no quota
        return cores


def memory_left() -> int | None:
    """Return how many bytes are left for more processes, of the machine's or of a container's limit."""
    most, used = cgroup_number("memory.max"), cgroup_number("memory.current")
    container = None if most is None or used is None else max(0, most - used)
    return min((number for number in (_available(), container) if number is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def cgroup_number(name: str) -> int | None:
    """Return a number of this container's, None where it has none."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def clocks_and_load() -> dict[str, float]:
    """Return what moves a measurement without anybody changing the program: a figure by its name and unit."""
    found: dict[str, float] = {}
    if (clock := _number(_cpuinfo("cpu MHz"))) is not None:
        found["cpu, MHz"] = clock
    if hasattr(os, "getloadavg"):
        found["load average over 1 min"] = round(os.getloadavg()[0], 2)
    for number, row in enumerate(gpu_rows(*_GPU_FIGURES)):
        for name, value in zip(_GPU_FIGURES.values(), row, strict=True):
            if (figure := _number(value)) is not None:
                found[f"gpu {number}: {name}"] = figure
    return found


def cpu_governor() -> str | None:
    """Return the policy that sets the processor's clock, for example ``performance``."""
    try:
        return _GOVERNOR.read_text().strip() or None
    except OSError:
        return None


def gpu_rows(*names: str) -> list[list[str]]:
    """Return what nvidia-smi says of each GPU in this machine, a row a GPU; nothing where it cannot say it."""
    said = command_output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = [[value.strip() for value in line.rsplit(",", len(names) - 1)] for line in (said or "").splitlines()]
    return rows if all(len(row) == len(names) for row in rows) else []


def _cpuinfo(field: str) -> str | None:
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in values if name.strip() == field), None)


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text) else None
