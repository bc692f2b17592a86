"""The times of events on a rank's devices, in seconds, on the machine's monotonic clock.

Taking a mark costs next to nothing; its time is known after the devices have finished. On the CPU, a mark is the time
itself. On CUDA, the host runs ahead of the device, so a mark is an event in the stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class HostClock:
    """For the CPU, which is never ahead of the caller."""

    def rest(self) -> None:
        """Wait until the devices have finished, and count times from here."""

    def mark(self) -> Any:
        return time.monotonic()

    def times(self, marks: Sequence[Any]) -> tuple[float, ...]:
        """Return the times of marks since the last ``rest``; waits until the devices have finished."""
        return tuple(marks)


class CudaClock(HostClock):
    """For CUDA devices; marks are taken on the first of them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._origin: tuple[float, Any] = (0.0, None)

    def rest(self) -> None:
        """Wait for all devices. An event in an empty stream happens at once, which links it to the host's clock."""
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
