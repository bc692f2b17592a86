"""How a training is divided into epochs, windows and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.core.training_behavior import TrainingBehavior
from plumbline.workloads import Workload

Position = tuple[int, int]
"""A point between two batches: the number of optimizer steps done, and of micro-batches of the next one."""


@dataclass(frozen=True)
class Epochs:
    """``count`` epochs, each of ``batches``, in windows of ``accumulate``; the last window may be shorter."""

    count: int
    batches: int
    accumulate: int

    @classmethod
    def of(cls, workload: Workload, behavior: TrainingBehavior, devices: int) -> Epochs:
        """Return how a subject divides a workload. A training by iterations is one epoch of whole windows."""
        if behavior.by_iterations:
            return cls(1, workload.steps(devices) * workload.accumulate, workload.accumulate)
        return cls(workload.epochs, workload.steps_per_epoch, workload.accumulate)

    @property
    def windows(self) -> int:
        return -(-self.batches // self.accumulate)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many micro-batches each optimizer step of the training has."""
        whole, rest = divmod(self.batches, self.accumulate)
        return ((self.accumulate,) * whole + ((rest,) if rest else ())) * self.count

    def after_batch(self, epoch: int, batches: int) -> tuple[Position, ...]:
        """Return the position after ``batches`` of an epoch; at a window's end, both after and before its step."""
        whole, rest = divmod(batches, self.accumulate)
        first = epoch * self.windows
        if rest and batches < self.batches:
            return ((first + whole, rest),)
        done = -(-batches // self.accumulate)
        return (first + done, 0), (first + done - 1, rest or self.accumulate)
