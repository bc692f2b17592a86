"""Positions of evaluations and reports in a training: the steps done, and the micro-batches done of the next one."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.judge.oracle.layout import Layout, Position, contract_layout, with_unique_draws
from plumbline.judge.trace_analysis import TraceAnalysis


def evaluations_due(analysis: TraceAnalysis) -> Iterator[tuple[Position, ...]]:
    """Yield the equivalent positions at which each evaluation is due that the workload asks for."""
    every, epochs = analysis.workload.validate_every, analysis.epochs
    if every is None:
        return
    for epoch in range(epochs.count):
        for batches in range(every, epochs.batches + 1, every):
            positions = epochs.after_batch(epoch, batches)
            if positions[0] <= (analysis.steps_due, 0):
                yield positions


def position_of(analysis: TraceAnalysis, step: int, micro_batches: int, rank: int) -> Position:
    """Return a recorded position, converted to the workload's micro-batches.

    More micro-batches are recorded if each device has its own loss, or if optimizers alternate, each with its own pass.
    """
    if not micro_batches or step >= len(analysis.steps):
        return step, micro_batches
    own = analysis.steps[step].ranks[rank]
    recorded = len(own.micro_batches) * (len(own.turns) if own.alternate else 1)
    return step, -(-micro_batches * len(rank_layout(analysis, step, rank)) // max(recorded, 1))


def rank_layout(analysis: TraceAnalysis, step: int, *ranks: int) -> Layout:
    """Return the layout of a step, also of a skipped one, for all ranks or for ``ranks``, without empty groups."""
    steps = with_unique_draws(analysis.steps[step].ranks)
    spread = analysis.cell.parallelism.devices_per_process(analysis.cell.topology)
    chosen = [steps[rank] for rank in ranks] or steps
    layout = contract_layout(chosen, spread, analysis.workload.accumulate)
    return tuple(tuple(group for group in groups if any(group)) for groups in layout if any(map(any, groups)))
