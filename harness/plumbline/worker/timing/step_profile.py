"""Profiles a few untimed steps: a trace of torch's profiler and, on CUDA, a memory snapshot.

The trace is for Perfetto or ``chrome://tracing``, the snapshot for torch's memory viewer. Errors of the profiler do not
end the training; they are in ``problems``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch

PROFILED_STEPS: Final = 3
"""Every round has at least this many steps, and viewers can open a trace with thousands of kernels per step."""

MOST_BYTES: Final = 64 << 20
"""Larger files are removed, because browsers do not open them."""

_MOST_ALLOCATIONS: Final = 20_000
"""The number of last events of the allocator that are kept, with a few kilobytes each."""


class StepProfile:
    """Profiles ``PROFILED_STEPS`` steps from ``start`` on, and writes files named after ``rank`` into ``folder``."""

    def __init__(self, folder: str, rank: int, *, on_cuda: bool) -> None:
        self.problems: list[str] = []
        self._folder = folder
        self._rank = rank
        self._on_cuda = on_cuda
        self._steps_left = 0
        self._profile: Any = None

    def start(self) -> None:
        self._steps_left = PROFILED_STEPS
        if self._on_cuda:
            self._attempt("memory snapshot", self._follow_memory)
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
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        profile.start()
        self._profile = profile
        self._mark_step()

    def _mark_step(self) -> None:
        # Steps end inside the optimizer's span, and viewers drop spans that overlap in part.
        with torch.profiler.record_function(f"step {PROFILED_STEPS - self._steps_left} begins"):
            pass

    def _follow_memory(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")

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
