"""torch's profiler around a few steps: shares of their time, and files for viewers.

``Collectives.share_of`` is the share of time with a pending collective, from its start on a rank until it is done. It
includes time that overlaps with the backward pass, and waiting for late ranks. It is an upper bound of the cost of
communication, not the cost: 0.1 can slow down a step by a tenth at most.

``shares_of`` assigns every moment to one of ``PARTS``. On a device, a moment in which a kernel other than a collective
runs is computation, then come exposed collectives, then waiting for data. On the CPU, loading a batch computes too: the
time between steps is data, unless a collective is pending, for example while a pipeline stage waits for another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final

import torch

from plumbline.devices.calls import profiled

_NAMES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""Gloo's collectives, from their start on, and NCCL's kernels on the device (``ncclKernel`` before NCCL 2.19).

Collectives of other libraries count as computation.
"""

_COPIES = ("Memcpy", "Memset")
_DATA = "plumbline: data"

PARTS = ("compute", "exposed_communication", "data", "idle")

Span = tuple[int, int]
"""Start and end, in nanoseconds."""


class Collectives:
    """Profiles from ``start`` to ``stop``; call ``data_begins`` and ``data_ends`` around the wait for each batch."""

    def __init__(self, device_type: str) -> None:
        self.is_active = False
        self._activities = profiled(device_type)
        self._on_device = len(self._activities) > 1
        self._profile: Any = None
        self._data: Any = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=self._activities)
        self._profile.start()
        self.is_active = True

    def stop(self) -> None:
        if self._profile is not None:
            self.data_ends()
            self._profile.stop()
            self.is_active = False

    def data_begins(self) -> None:
        """Note that a step is over and the next one has no batch yet."""
        self._data = torch.profiler.record_function(_DATA)
        self._data.__enter__()

    def data_ends(self) -> None:
        if self._data is not None:
            self._data.__exit__(None, None, None)
            self._data = None

    def share_of(self, seconds: float) -> float | None:
        """Return the share of ``seconds`` with at least one pending collective, None without collectives."""
        spans = sorted(span for name, _, span in self._events() if name.startswith(_NAMES))
        return union(spans) / 1e9 / seconds if spans else None

    def shares_of(self, seconds: float) -> dict[str, float] | None:
        """Return the shares of ``PARTS`` in ``seconds``, which add up to 1; None if nothing was profiled."""
        if self._profile is None:
            return None
        compute, communication, data = [], [], []
        for name, on_device, span in self._events():
            if name.startswith(_NAMES):
                communication.append(span)
            elif name == _DATA:
                data.append(span)
            elif on_device and not name.startswith(_COPIES) if self._on_device else name.startswith("aten::"):
                compute.append(span)
        if self._on_device:
            computing = covered(compute)
            loading = covered(compute, communication, data) - covered(compute, communication)
        else:
            computing = covered(data, compute) - covered(data)
            loading = covered(data, communication) - covered(communication)
        exposed = covered(data, compute, communication) - computing - loading
        parts = zip(PARTS, (computing, exposed, loading), strict=False)
        shares = {name: length / 1e9 / seconds for name, length in parts}
        # The profiler's clock and the round's end differ by microseconds.
        whole = max(1.0, sum(shares.values()))
        shares = {name: share / whole for name, share in shares.items()}
        return {**shares, "idle": 1 - sum(shares.values())}

    def _events(self) -> Iterable[tuple[str, bool, Span]]:
        """Yield the name of each event, whether it happened on a device, and its span."""
        if self._profile is None:
            return
        # The profile's own list takes a second to build.
        for event in self._profile.profiler.kineto_results.events():
            on_device = event.device_type().name != "CPU"
            # Ranges of the host are also reported on the device.
            if not (on_device and event.name() == _DATA):
                yield event.name(), on_device, (event.start_ns(), event.start_ns() + event.duration_ns())


def covered(*spans: Sequence[Span]) -> int:
    """Return the length of the union of all ``spans``."""
    return union(sorted(chain(*spans)))


def union(spans: list[Span]) -> int:
    """Return the length of the union of ``spans``, which are sorted by their starts."""
    length = reached = 0
    for begun, ended in spans:
        length += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    return length


PROFILED_STEPS: Final = 3
"""Every round has at least this many steps, and viewers can open a trace with thousands of kernels per step."""

MOST_BYTES: Final = 64 << 20
"""Larger files are removed, because browsers do not open them."""

_MOST_ALLOCATIONS: Final = 20_000
"""How many of the allocator's last events are kept, at a few kilobytes each."""


class StepProfile:
    """Profiles ``PROFILED_STEPS`` untimed steps from ``start`` on, and writes files of ``rank`` into ``folder``.

    They are a trace for Perfetto or ``chrome://tracing`` and, on CUDA, a snapshot for torch's memory viewer. Errors of
    the profiler do not end the training; they are in ``problems``.
    """

    def __init__(self, folder: str, rank: int, device_type: str) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._rank = rank
        self._activities = profiled(device_type)
        self._on_cuda = device_type == "cuda"
        self._steps_left = 0
        self._profile: Any = None

    def start(self) -> None:
        self._steps_left = PROFILED_STEPS
        if self._on_cuda:
            self._attempt(
                "memory snapshot",
                lambda: torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python"),
            )
        self._attempt("trace", self._follow_operations)

    def end_step(self) -> None:
        """Note the end of a step; the last one writes the files."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        if self._steps_left:
            self._mark_step()
            return
        if self._profile is not None:
            self._attempt("trace", lambda: self._write("trace.json.gz", self._write_trace))
        if self._on_cuda:
            self._attempt("memory snapshot", lambda: self._write("memory.pickle", _write_snapshot))

    def _follow_operations(self) -> None:
        profile = torch.profiler.profile(activities=self._activities, record_shapes=True, profile_memory=True)
        profile.start()
        self._profile = profile
        self._mark_step()

    def _mark_step(self) -> None:
        # Steps end inside the optimizer's span, and viewers drop spans that overlap in part.
        with torch.profiler.record_function(f"step {PROFILED_STEPS - self._steps_left} begins"):
            pass

    def _write_trace(self, path: str) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(path)

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        path = os.path.join(self._folder, f"rank-{self._rank}.{name}")
        unfinished = os.path.join(self._folder, f".rank-{self._rank}.{name}")
        write(unfinished)
        size = os.path.getsize(unfinished)
        if size > MOST_BYTES:
            os.remove(unfinished)
            raise ValueError(f"it has {size >> 20} MiB; the limit is {MOST_BYTES >> 20} MiB")
        os.replace(unfinished, path)

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self.problems.append(f"rank {self._rank}, {what}: {type(error).__name__}: {error}"[:500])


def _write_snapshot(path: str) -> None:
    try:
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
