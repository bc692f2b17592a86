"""How a training is divided into epochs, windows and micro-batches, and where in it evaluations and reports fall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.core.training_behavior import TrainingBehavior
from harness.judge.oracle.layout import Layout, contract_layout, with_unique_draws
from harness.workloads import Problem

if TYPE_CHECKING:
    from harness.judge.trace_analysis import TraceAnalysis

Position = tuple[int, int]
"""A point between two batches: the number of optimizer steps done, and of micro-batches of the next one."""


@dataclass(frozen=True)
class Epochs:
    """``count`` epochs, each of ``batches``, in windows of ``accumulate``; the last window may be shorter."""

    count: int
    batches: int
    accumulate: int

    @classmethod
    def of(cls, workload: Problem, behavior: TrainingBehavior, devices: int) -> Epochs:
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

    def after_batch(self, epoch: int, batches: int) -> tuple[Position, ...]:
        """Return the position after so many batches of an epoch; at a window's end, after its step or before it."""
        whole, rest = divmod(batches, self.accumulate)
        first = epoch * self.windows
        if rest and batches < self.batches:
            return ((first + whole, rest),)
        done = -(-batches // self.accumulate)
        return (first + done, 0), (first + done - 1, rest or self.accumulate)


def evaluations_due(analysis: TraceAnalysis) -> Iterator[tuple[Position, ...]]:
    """Yield the positions, alternatives to each other, at which each evaluation is due that the workload asks for."""
    every, epochs = analysis.workload.validate_every, analysis.epochs
    if every is None:
        return
    for epoch in range(epochs.count):
        for batches in range(every, epochs.batches + 1, every):
            positions = epochs.after_batch(epoch, batches)
            if positions[0] <= (analysis.steps_due, 0):
                yield positions


def position_of(analysis: TraceAnalysis, step: int, micro_batches: int, rank: int) -> Position:
    """Return a recorded position in the workload's micro-batches; a loss for each device records more of them."""
    if not micro_batches or step >= len(analysis.steps):
        return step, micro_batches
    recorded = len(analysis.steps[step].ranks[rank].micro_batches)
    return step, -(-micro_batches * len(rank_layout(analysis, step, rank)) // max(recorded, 1))


def rank_layout(analysis: TraceAnalysis, step: int, *ranks: int) -> Layout:
    """Return who computed what in a step, also in a skipped one: all ranks, or these, if they had samples."""
    steps = with_unique_draws(analysis.steps[step].ranks)
    spread = analysis.cell.contract.devices_per_process(analysis.cell.topology)
    chosen = [steps[rank] for rank in ranks] or analysis.with_a_loss(steps)
    layout = contract_layout(chosen, spread, analysis.workload.accumulate)
    return tuple(tuple(group for group in groups if any(group)) for groups in layout if any(map(any, groups)))
