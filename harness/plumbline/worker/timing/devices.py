"""The devices of a timed rank: their clock, their peak memory, and the core on which a round begins.

Times are in seconds on the machine's monotonic clock. Taking a mark costs next to nothing; its time is known after the
devices have finished. The host runs ahead of a GPU, so there a mark is an event in the stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from plumbline.devices.calls import has_events, mark, memory_stats, synchronize


class HostClock:
    """A clock for the CPU, which computes synchronously."""

    def rest(self) -> None:
        """Wait until the devices have finished, and count times from here."""

    def mark(self) -> Any:
        return time.monotonic()

    def times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        """Return the times of marks since the last ``rest``; waits until the devices have finished."""
        return tuple(marks)


class DeviceClock(HostClock):
    """A clock for devices with events. Marks are taken on the first device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._origin: tuple[float, Any] = (0.0, None)

    def rest(self) -> None:
        """Wait for all devices, and link their clock to the host's: an event in an empty stream happens at once."""
        for device in self._devices:
            synchronize(device)
        self._origin = (time.monotonic(), self.mark())

    def mark(self) -> Any:
        return mark(self._devices[0])

    def times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        for device in self._devices:
            synchronize(device)
        begun, origin = self._origin
        return tuple(begun + origin.elapsed_time(mark) / 1e3 for mark in marks)


class WaitingClock(HostClock):
    """A clock for devices without events. The host waits for the first device at each mark, which slows steps down."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))

    def rest(self) -> None:
        for device in self._devices:
            synchronize(device)

    def mark(self) -> Any:
        synchronize(self._devices[0])
        return time.monotonic()


def clock_of(devices: Sequence[torch.device]) -> HostClock:
    if devices[0].type == "cpu":
        return HostClock()
    return DeviceClock(devices) if has_events(devices[0]) else WaitingClock(devices)


_STATUS, _ROLLUP = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")


def memory_of(devices: Sequence[torch.device]) -> dict[str, int]:
    """Return bytes and counts by metric: of the allocator over the rank's devices, or of this process."""
    if devices[0].type == "cpu":
        return _private_memory()
    every = [memory_stats(device) for device in dict.fromkeys(devices)]
    if not any(every):
        return {}
    return {
        "memory_allocated_peak": max(stats.get("allocated_bytes.all.peak", 0) for stats in every),
        "memory_reserved_peak": max(stats.get("reserved_bytes.all.peak", 0) for stats in every),
        "allocator_retries": sum(stats.get("num_alloc_retries", 0) for stats in every),
        "out_of_memory": sum(stats.get("num_ooms", 0) for stats in every),
    }


def _private_memory() -> dict[str, int]:
    """Return the peak of this process's private memory, on Linux.

    A rank shares the pages of torch with its fork server, and 8 ranks must not count them eight times. The kernel has
    no peak of private dirty pages, but one of all resident pages since the fork. Pages that are no longer resident were
    private, because shared ones stay. So the peak is the private memory now, plus what was returned since the peak.
    """
    try:
        private = _kilobytes(_ROLLUP.read_text())["Private_Dirty"]
        status = _kilobytes(_STATUS.read_text())
    except (OSError, KeyError):
        return {}
    return {"memory_private_peak": (private + status["VmHWM"] - status["VmRSS"]) * 1024}


def _kilobytes(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}


def begin_on_core(number: int) -> None:
    """Move this thread to the core with this ``number``, modulo their count; the scheduler may then move it again.

    Cores are not equally fast: on a virtual machine, another guest may slow down one of them for minutes. The scheduler
    does not move a process that computes alone, so one of two trainers that take turns could have the slow core for a
    whole launch.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    with suppress(OSError):  # this is not allowed, or the core is offline
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
