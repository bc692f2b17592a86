"""The share of the time in which a collective was under way, by torch's own profiler, whatever code called it.

A collective is under way from the moment that a rank hands it over until it is done: what hides behind the backward
pass counts, and so does waiting for a rank that is late. It is no measure of what communication costs, but of where it
can cost anything: 0.1 can slow a step down by a tenth at most, and 0.9 hides in computation or is most of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

_NAMES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""Gloo's collectives, from the hand-over on, and NCCL's kernels on the device (the latter before NCCL 2.19)."""


class Collectives:
    """Looks from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin to look, where there may be something to see: a process group, or several CUDA devices."""
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not (grouped or on_cuda):
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """Look no longer."""
        if self._profile is not None:
            self._profile.stop()

    def share_of(self, seconds: float) -> float | None:
        """Return the part of ``seconds`` in which at least one collective was under way, None if there was none."""
        if self._profile is None:
            return None
        # Not the profile's own list, which takes a second to make out of thousands of events that are not needed.
        every = self._profile.profiler.kineto_results.events()
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in every
            if event.name().startswith(_NAMES)
        )
        return union(spans) / 1e9 / seconds if spans else None


def union(spans: list[tuple[int, int]]) -> int:
    """Return the length of what ``spans``, in the order of their beginnings, cover together."""
    covered = reached = 0
    for begun, ended in spans:
        covered += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    return covered
