"""Where a subject declares that each rank keeps its own buffers: are they what the rank's own samples make?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Tensors
from plumbline.judge.buffer_replay import (
    buffer_error,
    buffer_errors,
    buffers_after,
    changed,
    must_change,
    own_shares,
)
from plumbline.judge.findings import Vacuous, error_at, failed, from_deviation
from plumbline.judge.oracle.noise import Deviation, larger, limit
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis, same

Combination = Callable[[Sequence[Tensors]], Tensors]


def own_buffers(analysis: TraceAnalysis) -> Finding:
    """All ranks begin alike, and then each rank's forwards alone change its buffers: nothing is broadcast.

    One device computes something else, so this deviates if ranks have different buffers. A BatchNorm that shares its
    statistics has the same ones everywhere.
    """
    first = analysis.steps[0].ranks
    for rank, step in enumerate(first):
        if not same(step.buffers, first[0].buffers):
            message = "buffers differ from those of rank 0 before the first forward"
            return failed("buffers", message, cause="buffers-begin-apart", family="buffers", step=0, rank=rank)
    worst: dict[str, Deviation] = {}
    any_changed = False
    for global_step, following, rank in _rank_steps(analysis):
        any_changed = any_changed or changed(global_step, following, rank)
        for way, deviation in buffer_errors(analysis, global_step, following, rank):
            worst[way] = larger(worst.get(way), deviation)
    if not any_changed and must_change(analysis):
        raise Vacuous("no buffer changed from step to step")
    nearest = min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))
    if nearest.x_noise > limit():
        return _explained(worst["first device"], analysis)
    error = error_at(nearest, limit())
    if all(same(step.buffers, each.ranks[0].buffers) for each in analysis.steps for step in each.ranks[1:]):
        return from_deviation("buffers", Outcome.PASSED, f"buffers are those of one device: {error}", nearest)
    message = f"buffers are each rank's own, as the subject declares, but not those of one device: {error}"
    return from_deviation("buffers", Outcome.DEVIATES, message, nearest)


def _rank_steps(analysis: TraceAnalysis) -> Iterator[tuple[GlobalStep, GlobalStep, int]]:
    for global_step, following in pairwise(analysis.steps):
        for rank in range(len(global_step.ranks)):
            yield global_step, following, rank


def _first(own: Sequence[Tensors]) -> Tensors:
    return own[0]


def _mean(own: Sequence[Tensors]) -> Tensors:
    return {name: value / len(own) for name, value in _sum(own).items()}


def _sum(own: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([one[name].double() for one in own]).sum(0) for name in own[0]}


COMBINATIONS: tuple[tuple[str, str, Combination], ...] = (
    ("buffers-broadcast", "they are rank 0's: buffers are broadcast, so remove buffers='per-rank'", _first),
    ("buffers-averaged", "they are the mean over the ranks: do not average them", _mean),
    ("buffers-summed", "they are the sum over the ranks: do not reduce them", _sum),
)


def _explained(worst: Deviation, analysis: TraceAnalysis) -> Finding:
    """Return the failure at the first wrong step, with the combination of the ranks' buffers that fits."""
    global_step, following, rank = _first_wrong(analysis)
    micro_batches = analysis.cell.contract.micro_batches
    exact, replayed = (
        [buffers_after(oracle, step, own_shares(step), micro_batches) for step in global_step.ranks]
        for oracle in (analysis.oracle, analysis.cell_oracle)
    )
    found = following.ranks[rank].buffers
    judged = [name for name in found if name in exact[0] and found[name].is_floating_point()]
    cause, hint = "buffers-updated-otherwise", "something besides the rank's own forwards changes them"
    for name, words, combine in COMBINATIONS:
        right, rough = combine(exact), combine(replayed)
        if judged and all(buffer_error(found[n], right[n], rough[n], analysis) <= limit() for n in judged):
            cause, hint = name, words
            break
    place = replace(worst, step=following.index, rank=rank)
    message = f"buffers are not the rank's own: {error_at(place, limit())}: {hint}"
    finding = from_deviation("buffers", Outcome.FAILED, message, place)
    return replace(finding, cause=cause, family="buffers")


def _first_wrong(analysis: TraceAnalysis) -> tuple[GlobalStep, GlobalStep, int]:
    """Return the first step and rank whose forwards do not explain the next buffers."""
    return next(
        (global_step, following, rank)
        for global_step, following, rank in _rank_steps(analysis)
        for way, deviation in buffer_errors(analysis, global_step, following, rank)
        if way == "first device" and deviation.x_noise > limit()
    )
