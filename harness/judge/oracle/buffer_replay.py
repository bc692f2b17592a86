"""Repeats the forwards of a step to see what they make of a rank's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch

from harness.evidence.trace import Step, Tensors
from harness.judge.error_outcome import Deviation
from harness.judge.oracle.layout import Share
from harness.judge.oracle.noise import distance, in_noise, rounding_unit
from harness.judge.oracle.oracle import Oracle
from harness.judge.trace_analysis import GlobalStep, TraceAnalysis


def errors(
    analysis: TraceAnalysis, global_step: GlobalStep, following: GlobalStep, rank: int
) -> Iterator[tuple[str, Deviation]]:
    """Yield how far each buffer of ``rank`` at the following step is from what a step's forwards make of it, two ways.

    The forwards are those of the rank's first device, or of one device that takes everybody's samples: a BatchNorm
    that shares its statistics remembers those. A trainer keeps to one of the two.
    """
    begun, then = global_step.ranks[rank], following.ranks[rank].buffers
    for way, shares in _ways(global_step, rank):
        right, rounded = (after(oracle, begun, shares) for oracle in (analysis.oracle, analysis.cell_oracle))
        for name, value in then.items():
            if name not in right:
                continue  # the subject's own addition to the model: not the job's, so not judged
            yield way, Deviation(error(value, right[name], rounded[name], analysis), following.index, name, rank)


def error(value: torch.Tensor, right: torch.Tensor, rounded: torch.Tensor, analysis: TraceAnalysis) -> float:
    """Return how far a buffer is from what is right, in × noise; ``rounded`` is the same in the cell's precision."""
    unit = rounding_unit([right.double()], analysis.epsilon)
    return in_noise(distance(value, right), max(unit, distance(rounded, right)))


def own_shares(step: Step) -> list[Share]:
    """Return the samples of each forward of a rank's first device."""
    return [micro.forwards[0] for micro in step.micro_batches if micro.forwards]


def after(oracle: Oracle, step: Step, shares: list[Share]) -> Tensors:
    """Return what forwards over ``shares`` make of the buffers that a step began with."""
    oracle.load(step.before)
    return oracle.buffers_after(step.buffers, shares)


def moves(global_step: GlobalStep, following: GlobalStep, rank: int) -> bool:
    """Say whether a buffer of ``rank`` changed from step to step."""
    before, then = global_step.ranks[rank].buffers, following.ranks[rank].buffers
    return any(name not in before or not torch.equal(value, before[name]) for name, value in then.items())


def should_move(analysis: TraceAnalysis) -> bool:
    """Say whether the model has running statistics, which every forward in training changes."""
    names = (name.rpartition(".")[2] for name in analysis.oracle.buffers)
    return len(analysis.steps) > 1 and any(name.startswith(("running_", "num_batches_")) for name in names)


def _ways(global_step: GlobalStep, rank: int) -> Iterator[tuple[str, list[Share]]]:
    ranks = [step.micro_batches for step in global_step.ranks]
    yield "first device", own_shares(global_step.ranks[rank])
    yield (
        "one device",
        [tuple(i for micro in micros if micro for i in micro.samples) for micros in zip_longest(*ranks)],
    )
