"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    updated_again,
)
from plumbline.judge.findings import Vacuous, error_at, failed, failed_with_hint, from_deviation
from plumbline.judge.oracle.noise import Deviation, larger, limit
from plumbline.judge.trace_analysis import TraceAnalysis, same

CHECK = "buffers"


def buffers(analysis: TraceAnalysis) -> Finding | None:
    """All ranks must begin each step's forward with the same buffers: those that the first device computed.

    Buffers can differ after a forward, because DDP broadcasts them before the next one. None if the model has no
    buffers. If a subject declares that each rank keeps its own buffers, these must follow from the rank's own samples.
    """
    if not analysis.steps or not analysis.steps[0].ranks[0].buffers:
        return None
    if analysis.behavior.own_buffers and analysis.world > 1:
        return own_buffers(analysis)
    for global_step in analysis.steps:
        first = global_step.ranks[0].buffers
        for rank, step in enumerate(global_step.ranks):
            if not same(step.buffers, first):
                names = [name for name, own in step.buffers.items() if name not in first or not own.equal(first[name])]
                hint = "broadcast them before each forward, or declare buffers='per-rank' if that is intended"
                return not_broadcast(names, len(first), rank, hint, step=global_step.index)
    worst = _nearest(_errors_by_way(analysis, [0]))
    if worst.step:
        holder = analysis.buffer_holder(worst.step - 1, worst.parameter) if analysis.is_staged else None
        worst = replace(worst, rank=holder)
    if worst.x_noise <= limit() and analysis.is_staged and (found := _begun_otherwise(analysis)) is not None:
        return found
    if worst.x_noise <= limit():
        message = f"buffers are those of the first device: {error_at(worst, limit())}"
        return from_deviation(CHECK, Outcome.PASSED, message, worst)
    message = f"buffers are not those of the first device: {error_at(worst, limit())}"
    again = updated_again(analysis)
    finding = from_deviation(CHECK, Outcome.FAILED, message if again is None else f"{message}: {again}", worst)
    cause = "buffers-updated-otherwise" if again is None else "statistics-updated-again"
    return replace(finding, cause=cause, family="buffers")


def not_broadcast(
    names: Sequence[str],
    of: int,
    rank: int,
    hint: str,
    *,
    forward: str = "a forward",
    norms: str = "",
    step: int | None = None,
) -> Finding:
    """Return the failure of a rank that begins a forward with buffers of its own, where all ranks should share them."""
    return failed_with_hint(
        CHECK,
        f"buffers differ from those of rank 0 when {forward} begins ({len(names)} of {of}{norms})",
        hint,
        cause="buffers-not-broadcast",
        family="buffers",
        step=step,
        rank=rank,
        parameter=next(iter(names), None),
    )


def _begun_otherwise(analysis: TraceAnalysis) -> Finding | None:
    job = analysis.workload.model(analysis.cell_oracle.dtype)
    for name, right in job.named_buffers():
        rank = analysis.buffer_holder(0, name)
        found = None if rank is None else analysis.steps[0].ranks[0].buffers[name]
        if found is not None and not torch.equal(found, right.to(found.dtype)):
            return failed(
                CHECK,
                "the first forward started with buffers that differ from the job's (do not run the model in training "
                "mode before, for example to find shapes)",
                cause="statistics-updated-again",
                family="buffers",
                step=0,
                rank=rank,
                parameter=name,
            )
    return None


def own_buffers(analysis: TraceAnalysis) -> Finding:
    """All ranks must begin with equal buffers, which then only the rank's own forwards change: nothing is broadcast.

    One device computes other buffers, so the outcome is ``DEVIATES`` if the ranks' buffers differ. A BatchNorm that
    shares its statistics has equal buffers on all ranks.
    """
    first = analysis.steps[0].ranks
    for rank, step in enumerate(first):
        if not same(step.buffers, first[0].buffers):
            message = "buffers differ from those of rank 0 before the first forward"
            return failed("buffers", message, cause="buffers-begin-apart", family="buffers", step=0, rank=rank)
    worst = _errors_by_way(analysis, range(len(first)))
    nearest = _nearest(worst)
    if nearest.x_noise > limit():
        return _explained(worst["first device"], analysis)
    error = error_at(nearest, limit())
    if all(same(step.buffers, each.ranks[0].buffers) for each in analysis.steps for step in each.ranks[1:]):
        return from_deviation("buffers", Outcome.PASSED, f"buffers are those of one device: {error}", nearest)
    message = f"buffers are each rank's own, as the subject declares, but not those of one device: {error}"
    return from_deviation("buffers", Outcome.DEVIATES, message, nearest)


def _errors_by_way(analysis: TraceAnalysis, ranks: Sequence[int]) -> dict[str, Deviation]:
    """Replay the forwards of ranks from each step's buffers to the next step's, and return the largest errors."""
    worst: dict[str, Deviation] = {}
    any_changed = False
    for global_step, following in pairwise(analysis.steps):
        for rank in ranks:
            any_changed = any_changed or changed(global_step, following, rank)
            for way, deviation in buffer_errors(analysis, global_step, following, rank):
                worst[way] = larger(worst.get(way), deviation)
    if not any_changed and must_change(analysis):
        raise Vacuous("no buffer changed from step to step")
    return worst


def _nearest(worst: Mapping[str, Deviation]) -> Deviation:
    return min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))


def _sum(own: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([one[name].double() for one in own]).sum(0) for name in own[0]}


COMBINATIONS: tuple[tuple[str, str, Callable[[Sequence[Tensors]], Tensors]], ...] = (
    ("buffers-broadcast", "they are rank 0's: buffers are broadcast, so remove buffers='per-rank'",
        lambda own: own[0]),
    ("buffers-averaged", "they are the mean over the ranks: do not average them",
        lambda own: {name: value / len(own) for name, value in _sum(own).items()}),
    ("buffers-summed", "they are the sum over the ranks: do not reduce them", _sum),
)  # fmt: skip


def _explained(worst: Deviation, analysis: TraceAnalysis) -> Finding:
    """Return the failure at the first wrong step, with the combination of the ranks' buffers that fits."""
    global_step, following, rank = next(
        (global_step, following, rank)
        for global_step, following in pairwise(analysis.steps)
        for rank in range(len(global_step.ranks))
        for way, deviation in buffer_errors(analysis, global_step, following, rank)
        if way == "first device" and deviation.x_noise > limit()
    )
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
