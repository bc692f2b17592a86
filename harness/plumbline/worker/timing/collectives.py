"""What the time of a few steps went into, by torch's own profiler, whatever code called it.

``share_of`` is the share in which a collective was under way: from the moment that a rank hands it over until it is
done. What hides behind the backward pass counts, and so does waiting for a rank that is late. It is no measure of what
communication costs, but of where it can cost anything: 0.1 can slow a step down by a tenth at most, and 0.9 hides in
computation or is most of the step.

``shares_of`` divides the time: every moment is one of ``PARTS``. On CUDA the device decides: a moment in which any
kernel runs that is no collective is computation, then come exposed collectives, then waiting for data. On the CPU
loading a batch computes too: there a moment between two steps is data whatever happens in it, unless a collective is
under way, as while a stage of a pipeline waits for the stage before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

_NAMES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""Gloo's collectives, from the hand-over on, and NCCL's kernels on the device (the latter before NCCL 2.19)."""

_COPIES = ("Memcpy", "Memset")
_DATA = "plumbline: data"

PARTS = ("compute", "exposed_communication", "data", "idle")

Span = tuple[int, int]
"""From when to when, in nanoseconds."""


class Collectives:
    """Looks from ``start`` to ``stop``; ``data_begins`` and ``data_ends`` lie around the wait for each batch."""

    def __init__(self) -> None:
        self.looks = False
        self._on_cuda = False
        self._profile: Any = None
        self._data: Any = None

    def start(self) -> None:
        self._on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self.looks = True

    def stop(self) -> None:
        if self._profile is not None:
            self.data_ends()
            self._profile.stop()
            self.looks = False

    def data_begins(self) -> None:
        """Note that a step is over, and that the next one has no batch yet."""
        self._data = torch.profiler.record_function(_DATA)
        self._data.__enter__()

    def data_ends(self) -> None:
        if self._data is not None:
            self._data.__exit__(None, None, None)
            self._data = None

    def share_of(self, seconds: float) -> float | None:
        """Return the part of ``seconds`` in which at least one collective was under way, None if there was none."""
        spans = sorted(span for name, _, span in self._events() if name.startswith(_NAMES))
        return union(spans) / 1e9 / seconds if spans else None

    def shares_of(self, seconds: float) -> dict[str, float] | None:
        """Return the shares of ``PARTS`` in ``seconds``, which add up to 1; None where nothing was looked at."""
        if self._profile is None:
            return None
        compute, communication, data = [], [], []
        for name, on_device, span in self._events():
            if name.startswith(_NAMES):
                communication.append(span)
            elif name == _DATA:
                data.append(span)
            elif on_device and not name.startswith(_COPIES) if self._on_cuda else name.startswith("aten::"):
                compute.append(span)
        if self._on_cuda:
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
        """Yield the name of each event, whether it happened on a device of its own, and its span."""
        if self._profile is None:
            return
        # Not the profile's own list, which takes a second to make out of thousands of events that are not needed.
        for event in self._profile.profiler.kineto_results.events():
            on_device = event.device_type().name != "CPU"
            # A range of the host's is shown on the device too, as what it spans there.
            if not (on_device and event.name() == _DATA):
                yield event.name(), on_device, (event.start_ns(), event.start_ns() + event.duration_ns())


def covered(*spans: Sequence[Span]) -> int:
    """Return the length of what all of ``spans`` cover together."""
    return union(sorted(chain(*spans)))


def union(spans: list[Span]) -> int:
    """Return the length of what ``spans``, in the order of their beginnings, cover together."""
    length = reached = 0
    for begun, ended in spans:
        length += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    return length
