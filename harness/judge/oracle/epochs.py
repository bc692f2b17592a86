"""How a training is divided into epochs, windows and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.training_behavior import TrainingBehavior
from harness.workloads import Workload


@dataclass(frozen=True)
class Epochs:
    """``count`` epochs, each of so many ``batches``, in windows of ``accumulate``; the last window may be shorter."""

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
        """How many optimizer steps an epoch has."""
        return -(-self.batches // self.accumulate)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many micro-batches each optimizer step of the training has."""
        whole, rest = divmod(self.batches, self.accumulate)
        return ((self.accumulate,) * whole + ((rest,) if rest else ())) * self.count
