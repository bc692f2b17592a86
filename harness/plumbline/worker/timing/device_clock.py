"""When something happened on a rank's devices, in seconds of the machine's monotonic clock.

A mark is taken in passing and costs next to nothing; what it means is known when the devices have come to rest. On the
cpu a mark is the time itself. On CUDA the host runs ahead of the device, so a mark is an event in the stream: the time
at which the device got there, not at which the host issued it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class HostClock:
    """For devices that compute while one asks: the cpu."""

    def rest(self) -> None:
        """Wait until nothing is left to compute, and count from here."""

    def mark(self) -> Any:
        return time.monotonic()

    def times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        """Return what marks since the last ``rest`` mean; the devices are at rest again."""
        return tuple(marks)


class CudaClock(HostClock):
    """For CUDA devices; marks are taken on the first of them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._origin: tuple[float, Any] = (0.0, None)

    def rest(self) -> None:
        """Wait for all devices; an event in an empty stream happens at once, which ties it to the host's clock."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._origin = (time.monotonic(), self.mark())

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._devices[0]))
        return event

    def times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        for device in self._devices:
            torch.cuda.synchronize(device)
        begun, origin = self._origin
        return tuple(begun + origin.elapsed_time(mark) / 1e3 for mark in marks)


def clock_of(devices: Sequence[torch.device]) -> HostClock:
    return CudaClock(devices) if devices[0].type == "cuda" else HostClock()
