"""The base class of performance workloads, which have a size for each accelerator and little data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plumbline.workloads.dataset import Batch, Columns, Sample
from plumbline.workloads.workload import Workload

DISTINCT = 64
"""Number of samples drawn. The dataset repeats them with new ids, so that a large dataset needs little memory."""

FEWEST_STEPS = 3
"""Minimum number of steps per round, however many simulated devices share the cores, because all ranks wait for each
other before a round's first step."""

MOST_PROFILED = 8
"""Maximum number of steps under torch's profiler, which records every call of every step."""


@dataclass(frozen=True)
class Extent:
    """The length of one launch in optimizer steps: ``warmup`` steps, then ``rounds`` timed rounds of ``steps`` each.

    Then follow one step in which tensors are counted, and a few in which collectives are profiled.
    """

    warmup: int
    rounds: int
    steps: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The steps after which all ranks wait for each other, including the last one."""
        timed = [self.warmup + number * self.steps for number in range(self.rounds + 1)]
        return (*timed, timed[-1] + 1, timed[-1] + 1 + min(self.steps, MOST_PROFILED))

    @property
    def steps_in_all(self) -> int:
        return self.boundaries[-1]


@dataclass(frozen=True)
class ProblemSize:
    """The size of a workload on one accelerator: the model's arguments, samples per device, and steps per round."""

    model: dict[str, int]
    batch: int
    steps: int
    warmup: int = 3


class Repeated(Columns):
    """``count`` samples that repeat fewer distinct ones cyclically, each with its own index."""

    def __init__(self, columns: Batch, count: int) -> None:
        super().__init__(columns)
        self._distinct = len(self.columns.pop("index"))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Batch:
        if not 0 <= position < self._count:
            raise IndexError(position)
        chosen = position % self._distinct
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Sample(columns, index=torch.tensor(position))

    def batch(self, indices: Sequence[int]) -> Batch:
        wanted = torch.as_tensor(indices, dtype=torch.long)
        return {**{name: column[wanted % self._distinct] for name, column in self.columns.items()}, "index": wanted}


class PerformanceWorkload(Workload):
    """A problem that is trained to measure speed. ``dominated_by`` says what takes most of a step's time, and why.

    ``sizes`` has a size for ``cpu`` and one for ``cuda``, which all other accelerators share. A ``strong`` workload has
    the global batch of eight devices on any number of devices (strong scaling); the others have a fixed batch per
    device. Each launch times ``rounds`` rounds. ``backends`` (None: all) and ``precisions`` limit the planned cells;
    ``on_nodes`` names the backends that run on several nodes.
    """

    exposes = "speed and memory; what it computes is not judged"
    dominated_by: ClassVar[str]
    sizes: ClassVar[dict[str, ProblemSize]]
    strong: ClassVar[bool] = False
    backends: ClassVar[tuple[str, ...] | None] = None
    on_nodes: ClassVar[tuple[str, ...]] = ("ddp2",)
    precisions: ClassVar[tuple[str, ...]] = ("32",)
    rounds: ClassVar[int] = 4
    epochs = 1
    accelerator: str = "cpu"

    @property
    def size(self) -> ProblemSize:
        return self.sizes["cpu" if self.accelerator == "cpu" else "cuda"]

    def on(self, accelerator: str) -> PerformanceWorkload:
        other = copy.copy(self)
        other.accelerator = accelerator
        return other

    def extent(self, devices: int) -> Extent:
        """Return the steps of a launch on this many devices.

        Simulated devices share the cores of one machine. A round there has about the same number of samples on any
        number of devices, and so fewer steps on more devices.
        """
        steps = self.size.steps if self.accelerator != "cpu" else max(FEWEST_STEPS, self.size.steps // devices)
        return Extent(self.size.warmup, self.rounds, steps)

    def global_batch_size(self, devices: int) -> int:
        wanted = self.size.batch * (8 if self.strong else devices)
        return -(-wanted // devices) * devices

    def steps(self, devices: int) -> int:
        return self.extent(devices).steps_in_all

    def samples(self, devices: int) -> int:
        return self.extent(devices).steps_in_all * self.global_batch_size(devices)

    def _draw(self, count: int, seed: int, dtype: torch.dtype) -> Columns:
        return Repeated(super()._draw(DISTINCT, seed, dtype).columns, count)
