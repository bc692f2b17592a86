"""Measures seconds on a device, by CUDA events or by a CPU clock, and what stages take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

Clock = Callable[[], Any]
"""Returns a point in time, for ``median_seconds``."""


def computing_clock(device: torch.device) -> Clock:
    """Return a clock for this thread's computation on a device.

    On the CPU it counts this thread's own time, since simulated devices may share cores with other processes.
    """
    if device.type != "cuda" and torch.get_num_threads() == 1:
        return thread_time
    return wall_clock(device)


def wall_clock(device: torch.device) -> Clock:
    return _event if device.type == "cuda" else perf_counter


def median_seconds(spans: Iterable[tuple[Any, Any]]) -> float:
    """Return the median seconds between pairs of points in time, 0 if there are none."""
    spans = list(spans)
    if not spans:
        return 0.0
    if isinstance(spans[0][0], float):
        return float(median(end - start for start, end in spans))
    spans[-1][1].synchronize()
    return float(median(start.elapsed_time(end) / 1000 for start, end in spans))


def _event() -> torch.cuda.Event:
    recorded: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    recorded.record()
    return recorded


KEPT = 256
"""Of how many micro-batches, the last ones, times are kept."""


class StageClock:
    """Measures the computation of this stage without waiting, and whole batches with it."""

    def __init__(self, device: torch.device) -> None:
        self.computing, self.wall = computing_clock(device), wall_clock(device)
        self.spans: dict[str, deque[tuple[Any, Any]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.disturbed = False
        """Whether what was measured so far took longer than usual: it counts only if nothing follows."""

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure a piece of work, unless it raises: its computing, or of a whole ``"batch"`` the waiting too."""
        if self.disturbed:
            self.disturbed = False
            self.spans.clear()
        clock = self.wall if kind == "batch" else self.computing
        start = clock()
        yield
        self.spans[kind].append((start, clock()))

    def report(self) -> tuple[float, float]:
        """Return the seconds of a micro-batch and of a batch."""
        forward, backward, batch = (median_seconds(self.spans[kind]) for kind in ("forward", "backward", "batch"))
        return forward + backward, batch
