"""Finds ranks whose samples agree more often than chance explains, where each rank should draw independently.

A training by iterations has no epoch in which each sample is due once. All that can be checked is whether the ranks are
independent: with a shared generator, or generators with equal seeds, all ranks draw the same samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.evidence.trace import Step
from plumbline.judge.oracle.dropout_masks import surprise_limit
from plumbline.judge.trace_analysis import TraceAnalysis

RANKS_FOR_THE_RATE = 8
"""The number of ranks from which the rate of chance agreements is estimated."""


@dataclass(frozen=True)
class SharedDraws:
    """Two ranks drew the same sample at ``count`` of ``places`` places, in one ``step`` or, if it is None, in all."""

    first: int
    second: int
    step: int | None
    count: int
    places: int


def drawn(step: Step) -> tuple[int, ...]:
    """Return the sample ids that went through the model's forward in a rank's step."""
    return tuple(i for micro in step.micro_batches for i in micro.samples)


def unlike_members(analysis: TraceAnalysis) -> tuple[int, int, int] | None:
    """Return a step and two ranks of one replica that used different samples in it; None if all agree.

    A rank that passes no batch to the model, such as a later pipeline stage, agrees with every other rank.
    """
    groups = analysis.cell.parallelism.replicas(analysis.cell.topology)
    for each in analysis.recorded_steps:
        for group in groups:
            used = {rank: sorted(drawn(each.ranks[rank])) for rank in group if rank < len(each.ranks)}
            used = {rank: samples for rank, samples in used.items() if samples}
            first = min(used, default=0)
            for rank, samples in used.items():
                if samples != used[first]:
                    return each.index, first, rank
    return None


def repeated(analysis: TraceAnalysis) -> tuple[int, int] | None:
    """Return the step and the rank at which a micro-batch, or a whole step, repeats the draws of the previous one."""
    size, world = len(analysis.oracle.data), analysis.world
    for trace in analysis.trace.ranks:
        micros = [(step, micro.samples) for step, own in enumerate(trace.steps) for micro in own.micro_batches]
        steps = [(step, drawn(own)) for step, own in enumerate(trace.steps)]
        limit = surprise_limit(2 * world * len(micros))
        for draws in (micros, steps):
            for (_, before), (step, now) in itertools.pairwise(draws):
                # If all ranks' draws cover most of the data, a sequential sampler has no other batch to draw.
                only_batch = 2 * world * len(set(now)) > size
                if now == before and not only_batch and len(now) * math.log(size) > limit:
                    return step, trace.rank
    return None


def shared(analysis: TraceAnalysis) -> SharedDraws | None:
    """Return the two ranks whose draws agree, place by place, more than chance explains; None if none do.

    The probability that a place agrees by chance is the rate at which draws of different steps agree, and at least one
    over the number of samples to choose from.
    """
    table = _table(analysis)
    if table is None:
        return None
    ranks, steps, width = table.shape
    size = len(analysis.oracle.data)
    rate = max(1 / max(size - width, size / 2), _rate_by_chance(table))
    largest, worst = surprise_limit(ranks * (ranks - 1) // 2 * (steps + 1)), None
    for first in range(ranks - 1):
        alike = (table[first] == table[first + 1 :]).sum(2)
        for counts, places, by_step in ((alike, width, True), (alike.sum(1, keepdim=True), steps * width, False)):
            surprises = _surprise(counts.double(), places, rate)
            place = int(surprises.argmax())
            if float(surprises.flatten()[place]) > largest:
                largest = float(surprises.flatten()[place])
                other, step = divmod(place, counts.shape[1])
                count = int(counts[other, step])
                worst = SharedDraws(first, first + 1 + other, step if by_step else None, count, places)
    return worst


def _table(analysis: TraceAnalysis) -> Tensor | None:
    """Return the draws as a table of ranks × steps × places; the shortest step of any rank limits the places."""
    draws: Sequence[Sequence[tuple[int, ...]]] = [
        [drawn(step.ranks[rank]) for step in analysis.steps] for rank in range(analysis.world)
    ]
    width = min((len(step) for own in draws for step in own), default=0)
    if len(draws) < 2 or not width:
        return None
    return torch.tensor([[step[:width] for step in own] for own in draws])


def _rate_by_chance(table: Tensor) -> float:
    """Return how often draws of different ranks at different steps agree; 0 if there is only one step."""
    some = table[:RANKS_FOR_THE_RATE]
    ranks, steps, width = some.shape
    alike = 0
    for lag in range(1, steps):
        moved = some.roll(lag, dims=1)
        alike += sum(int((some[first] == moved[first + 1 :]).sum()) for first in range(ranks - 1))
    places = (steps - 1) * steps * width * ranks * (ranks - 1) // 2
    return alike / places if places else 0.0


def _surprise(counts: Tensor, places: int, rate: float) -> Tensor:
    """Return minus the logarithm of (Chernoff's bound on) the probability of at least ``counts`` agreements."""
    share = counts / places
    entropy = torch.special.xlogy(share, share / rate) + torch.special.xlogy(1 - share, (1 - share) / (1 - rate))
    return torch.where(share > rate, places * entropy, 0.0) if rate < 1 else torch.zeros_like(share)
