"""An interrupted training, to be compared with the same training without interruption."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from plumbline.core.cell import Cell
from plumbline.evidence.trace import RankTrace, Step, Tensors, Trace
from plumbline.judge.trace_analysis import TraceAnalysis

Draws = tuple[int, ...]
"""The sample ids that all ranks together used in one step, sorted."""


class Interruption:
    """Three launches of one cell: ``whole`` without interruption, ``saved``, which stopped, and ``resumed``.

    Steps are counted as in the whole training, including skipped attempts.
    """

    def __init__(self, whole: TraceAnalysis, saved: Trace, resumed: Trace) -> None:
        self.workload = whole.workload
        self.whole = whole
        self.saved = TraceAnalysis(saved, whole.workload, saving_cell(whole), whole.behavior)
        self.resumed = TraceAnalysis(resumed, whole.workload, whole.cell, whole.behavior)

    @cached_property
    def steps_done(self) -> int:
        return len(self.saved.steps)

    @cached_property
    def total(self) -> int:
        """How many steps the whole training has."""
        return len(self.whole.steps)

    @cached_property
    def epoch_length(self) -> int:
        """How many steps an epoch has."""
        return self.whole.epochs.windows

    @cached_property
    def epoch_begin(self) -> int:
        """The first step of the epoch in which training was interrupted."""
        return self.steps_done - self.steps_done % self.epoch_length

    @cached_property
    def draws(self) -> tuple[tuple[Draws, ...], tuple[Draws, ...], tuple[Draws, ...]]:
        """The samples of each step of the whole, the saved and the resumed training."""
        return _draws(self.whole), _draws(self.saved), _draws(self.resumed)

    def origin(self, rank: int) -> RankTrace:
        """Return the saved rank that a resumed one continues: the same, or the first if the number of ranks differs."""
        ranks = self.saved.trace.ranks
        return ranks[rank] if self.saved.cell == self.whole.cell else ranks[0]

    def left(self, rank: int) -> tuple[Tensors, ...]:
        """Return the weights from which a rank may continue: after the last step, and at the end of the launch."""
        left = [
            trace for origin in (self.origin(rank), self.origin(0)) for trace in (origin.steps[-1].after, origin.final)
        ]
        return tuple(weights for weights in left if weights is not None)

    def joined(self, rank: int) -> RankTrace:
        """Return a rank's training as one trace: the steps before the interruption, and the resumed ones."""
        after = self.resumed.trace.ranks[rank]
        return replace(after, steps=self.origin(rank).steps + after.steps)

    def pairs(self) -> list[tuple[int, int, Step, Step]]:
        """Return each resumed step with its number, its rank, and the same step of the whole training."""
        return [
            (
                self.steps_done + global_step.index,
                rank,
                step,
                self.whole.steps[self.steps_done + global_step.index].ranks[rank],
            )
            for global_step in self.resumed.steps
            if self.steps_done + global_step.index < self.total
            for rank, step in enumerate(global_step.ranks)
        ]


def saving_cell(whole: TraceAnalysis) -> Cell:
    """Return the cell of the launch that stops: for an elastic training, with a different number of devices."""
    return whole.cell.resized if whole.workload.elastic else whole.cell


def _draws(analysis: TraceAnalysis) -> tuple[Draws, ...]:
    return tuple(
        tuple(sorted(i for step in global_step.ranks for micro in step.micro_batches for i in micro.samples))
        for global_step in analysis.steps
    )
