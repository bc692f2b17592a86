"""Reads the CPU, memory and GPUs of this machine, and their clocks, load and energy. Initialises no device.

The energy of GPUs comes from the counters of the driver (NVML, on Volta and newer).
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from plumbline.devices.host_memory import free_bytes_of_host
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
    free = free_bytes_of_host()
    return int(psutil.virtual_memory().available) if free is None else max(0, free)


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


NVML_LIBRARY: Final = "libnvidia-ml.so.1"

COUNTER_PERIOD_S: Final = 0.1
"""Newer GPUs update a counter every 20 to 100 ms (PETSc manual, ``PetscLogGpuEnergyMeter``)."""

_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


Counters = dict[str, float]  # joules by the UUID of the GPU


class NoEnergyError(Exception):
    """Energy cannot be read on this machine; the message says why."""


class EnergyMeter:
    """The energy counters of all GPUs. ``load`` opens the driver's library by name.

    Raises:
        NoEnergyError: The library cannot be opened, or fails.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._nvml = load(NVML_LIBRARY)
        except OSError as error:
            raise NoEnergyError(f"the driver's library {NVML_LIBRARY} cannot be opened ({error})") from error
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = dict(map(self._device, range(count.value)))

    def read(self) -> Counters:
        """Return the joules that each GPU has used since its driver was loaded, without GPUs that have no counter."""
        found = {}
        for uuid, handle in self._devices.items():
            millijoules = ctypes.c_ulonglong()
            if not self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                found[uuid] = millijoules.value / 1e3
        return found

    def _device(self, index: int) -> tuple[str, ctypes.c_void_p]:
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        return uuid.value.decode(), handle

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise NoEnergyError(f"NVML's {name} failed with error {code}")


@cache
def meter_of(accelerator: str) -> Callable[[], Counters]:
    """Return a function that reads the energy counters; it raises ``NoEnergyError`` if there are none."""
    try:
        if accelerator == "cpu":
            raise NoEnergyError("simulated devices have no energy counter")
        if accelerator != "cuda":
            raise NoEnergyError("energy is measured on NVIDIA GPUs only")
        return EnergyMeter().read
    except NoEnergyError as error:
        why = error

    def refuse() -> Counters:
        raise why

    return refuse
