"""Replays the forwards of a step: what they make of a rank's buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import torch

from plumbline.evidence.trace import Step, Tensors
from plumbline.judge.oracle.layout import Share
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, nudged, rounding_unit
from plumbline.judge.oracle.oracle import Oracle, turns_of
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

NUDGED = 4
"""Replays in float64 that measure its noise: the largest counts, as few units may hardly be rounded in one of them."""


def buffer_errors(
    analysis: TraceAnalysis, global_step: GlobalStep, following: GlobalStep, rank: int
) -> Iterator[tuple[str, Deviation]]:
    """Yield how far each buffer of ``rank`` at the following step is from what this step's forwards make of it.

    Each is yielded twice: for the forwards of the rank's ``first device``, and for those of ``one device`` that takes
    all samples, as a BatchNorm that shares its statistics remembers them. A trainer keeps to one of the two.
    """
    start, found = global_step.ranks[rank], following.ranks[rank].buffers
    micro_batches = zip_longest(*(step.micro_batches for step in global_step.ranks))
    everybody = [tuple(i for micro in micros if micro for i in micro.samples) for micros in micro_batches]
    for way, shares in (("first device", own_shares(start)), ("one device", everybody)):
        right = buffers_after(analysis.oracle, start, shares, analysis.cell.contract.micro_batches)
        replays = list(_replays(analysis, start, shares))
        for name, value in found.items():
            if name not in right:
                continue  # the subject's own addition to the model: not the job's, so not judged
            error = min(buffer_error(value, right[name], replayed[name], analysis) for replayed in replays)
            yield way, Deviation(error, following.index, name, rank)


def _replays(analysis: TraceAnalysis, step: Step, shares: list[Share]) -> Iterator[Tensors]:
    """Yield what the forwards make of a step's buffers in the cell's precision.

    Float64 is compared with itself, so its weights are nudged: a statistic of what is centred already, as behind
    another BatchNorm, is nothing but the rounding inside the layers before it.
    """
    oracle, micro_batches = analysis.cell_oracle, analysis.cell.contract.micro_batches
    if oracle.dtype is not torch.float64:
        yield buffers_after(oracle, step, shares, micro_batches)
        return
    generator = torch.Generator().manual_seed(analysis.workload.seed)
    for _ in range(NUDGED):
        weights = nudged(step.before, generator)
        yield buffers_after(oracle, replace(step, before=weights), shares, micro_batches)


def buffer_error(value: torch.Tensor, exact: torch.Tensor, replayed: torch.Tensor, analysis: TraceAnalysis) -> float:
    """Return how far a buffer is from ``exact``, in × noise.

    Noise is the error of ``replayed``, the same in the cell's precision, and at least one rounding.
    """
    noise = max(rounding_unit([exact.double()], analysis.epsilon), distance(replayed, exact))
    return in_noise(distance(value, exact), noise)


def own_shares(step: Step) -> list[Share]:
    """Return the samples of each forward of a rank's first device."""
    return [micro.forwards[0] for micro in step.micro_batches if micro.forwards]


def buffers_after(oracle: Oracle, step: Step, shares: list[Share], micro_batches: int) -> Tensors:
    """Return what forwards over ``shares`` make of the buffers that a step began with; each turn makes its own.

    A batch has so many ``micro_batches``, each with a share; optimizers alternate between batches.
    """
    buffers, last, before = step.buffers, shares, list[Share]()
    if step.alternate:
        batches = [shares[first : first + micro_batches] for first in range(0, len(shares), micro_batches)]
        last = batches[-1] if batches else []
        before = [share for batch in batches[:-1] for _ in step.turns for share in batch]
    for turn, weights in enumerate((step.before, *(left for _, left in turns_of(step)))):
        oracle.load(weights)
        buffers = oracle.buffers_after(buffers, last if turn else [*before, *last])
    return buffers


def changed(global_step: GlobalStep, following: GlobalStep, rank: int) -> bool:
    """Return whether a buffer of ``rank`` changed from step to step."""
    before, then = global_step.ranks[rank].buffers, following.ranks[rank].buffers
    return any(name not in before or not torch.equal(value, before[name]) for name, value in then.items())


def must_change(analysis: TraceAnalysis) -> bool:
    """Return whether the model has running statistics, which every forward in training changes."""
    names = (name.rpartition(".")[2] for name in analysis.oracle.buffers)
    return len(analysis.steps) > 1 and any(name.startswith(("running_", "num_batches_")) for name in names)
