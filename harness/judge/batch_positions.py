"""Moments between two batches: where an evaluation happened or a metric was reported, and where one is due."""

from __future__ import annotations

from collections.abc import Iterator

from harness.judge.oracle.epochs import Epochs
from harness.judge.oracle.layout import Layout, contract_layout, with_unique_draws
from harness.judge.trace_analysis import TraceAnalysis

Position = tuple[int, int]
"""So many optimizer steps were done, and so many micro-batches of the next one."""


def rank_layout(analysis: TraceAnalysis, step: int, *ranks: int) -> Layout:
    """Return who computed what in a step, skipped ones included: all ranks, or these; nobody without a sample."""
    steps = with_unique_draws(analysis.steps[step].ranks)
    spread = analysis.cell.contract.devices_per_process(analysis.cell.topology)
    layout = contract_layout([steps[rank] for rank in ranks or range(len(steps))], spread, analysis.workload.accumulate)
    return tuple(tuple(group for group in groups if any(group)) for groups in layout if any(map(any, groups)))


def place(analysis: TraceAnalysis, step: int, micro_batches: int, rank: int) -> Position:
    """Return a recorded place in micro-batches of the workload; who takes a loss a device leaves more of them."""
    if not micro_batches or step >= len(analysis.steps):
        return step, micro_batches
    recorded = len(analysis.steps[step].ranks[rank].micro_batches)
    return step, -(-micro_batches * len(rank_layout(analysis, step, rank)) // max(recorded, 1))


def after_batch(epochs: Epochs, epoch: int, batches: int) -> tuple[Position, ...]:
    """Return where one is after so many batches of an epoch; at a window's end that is after its step, or before."""
    whole, rest = divmod(batches, epochs.accumulate)
    first = epoch * epochs.windows
    if rest and batches < epochs.batches:
        return ((first + whole, rest),)
    done = -(-batches // epochs.accumulate)
    return (first + done, 0), (first + done - 1, rest or epochs.accumulate)


def due(analysis: TraceAnalysis) -> Iterator[tuple[Position, ...]]:
    """Yield the places at which an evaluation is due; none where the workload does not ask for any."""
    every, epochs = analysis.workload.validate_every, analysis.epochs
    if every is None:
        return
    for epoch in range(epochs.count):
        for batches in range(every, epochs.batches + 1, every):
            places = after_batch(epochs, epoch, batches)
            if places[0] <= (analysis.steps_due, 0):
                yield places
