"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?

The forwards of a step, or some of them twice, are replayed to compute a rank's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Step, Tensors, same
from plumbline.judge.findings import Vacuous, error_at, failed, failed_with_hint, from_deviation
from plumbline.judge.oracle.layout import Share
from plumbline.judge.oracle.noise import Deviation, distance, in_noise, larger, limit, nudged, rounding_unit
from plumbline.judge.oracle.oracle import Oracle, turns_of
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

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
        holder = _holder(analysis, worst.step - 1, worst.parameter) if analysis.is_staged else None
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
        f"{len(names)} of {of} buffers differ from those of rank 0 when {forward} begins{norms}, first",
        hint,
        cause="buffers-not-broadcast",
        family="buffers",
        step=step,
        rank=rank,
        parameter=next(iter(names), None),
    )


def _holder(analysis: TraceAnalysis, index: int, name: str | None) -> int | None:
    """Return the first rank that recorded a buffer at a step; None if none did."""
    ranks = analysis.recorded_steps[index].ranks
    return next((rank for rank, step in enumerate(ranks) if name in step.buffers), None)


def _begun_otherwise(analysis: TraceAnalysis) -> Finding | None:
    job = analysis.workload.model(analysis.cell_oracle.dtype)
    for name, right in job.named_buffers():
        rank = _holder(analysis, 0, name)
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
    micro_batches = analysis.cell.parallelism.micro_batches
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


NUDGED = 4
"""Replays in float64 that measure its noise. The largest counts: a replay may hardly round a small buffer."""


def buffer_errors(
    analysis: TraceAnalysis, global_step: GlobalStep, following: GlobalStep, rank: int
) -> Iterator[tuple[str, Deviation]]:
    """Yield the error of each buffer of ``rank`` at the following step, compared with replays of this step's forwards.

    Each buffer is yielded twice: for the forwards of the rank's ``first device``, and for those of ``one device`` that
    takes all samples, as for a BatchNorm that shares its statistics. A trainer follows one of the two.
    """
    start, found = global_step.ranks[rank], following.ranks[rank].buffers
    micro_batches = zip_longest(*(step.micro_batches for step in global_step.ranks))
    everybody = [tuple(i for micro in micros if micro for i in micro.samples) for micros in micro_batches]
    for way, shares in (("first device", own_shares(start)), ("one device", everybody)):
        right = buffers_after(analysis.oracle, start, shares, analysis.cell.parallelism.micro_batches)
        replays = list(_replays(analysis, start, shares))
        for name, value in found.items():
            if name not in right:
                continue  # the subject's own addition to the model: not the job's, so not judged
            error = min(buffer_error(value, right[name], replayed[name], analysis) for replayed in replays)
            yield way, Deviation(error, following.index, name, rank)


def _replays(analysis: TraceAnalysis, step: Step, shares: list[Share]) -> Iterator[Tensors]:
    """Yield the buffers after a step's forwards in the cell's precision.

    Float64 is compared with itself, so its weights are nudged: the mean of activations that are already centred, for
    example after another BatchNorm, consists only of rounding errors of the layers before it.
    """
    oracle, micro_batches = analysis.cell_oracle, analysis.cell.parallelism.micro_batches
    if oracle.dtype is not torch.float64:
        yield buffers_after(oracle, step, shares, micro_batches)
        return
    generator = torch.Generator().manual_seed(analysis.workload.seed)
    for _ in range(NUDGED):
        weights = nudged(step.before, generator)
        yield buffers_after(oracle, replace(step, before=weights), shares, micro_batches)


def buffer_error(value: torch.Tensor, exact: torch.Tensor, replayed: torch.Tensor, analysis: TraceAnalysis) -> float:
    """Return how far a buffer is from ``exact``, in × noise.

    Noise is the error of ``replayed``, the same buffer in the cell's precision, and at least one rounding.
    """
    noise = max(rounding_unit([exact.double()], analysis.epsilon), distance(replayed, exact))
    return in_noise(distance(value, exact), noise)


def own_shares(step: Step) -> list[Share]:
    """Return the samples of each forward of a rank's first device."""
    return [micro.forwards[0] for micro in step.micro_batches if micro.forwards]


def buffers_after(oracle: Oracle, step: Step, shares: list[Share], micro_batches: int) -> Tensors:
    """Return the buffers after forwards over ``shares`` from the start of a step; each turn makes its own forwards.

    Each batch consists of ``micro_batches`` shares; optimizers can alternate between batches.
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
    before, then = global_step.ranks[rank].buffers, following.ranks[rank].buffers
    return any(name not in before or not torch.equal(value, before[name]) for name, value in then.items())


def must_change(analysis: TraceAnalysis) -> bool:
    """Return whether the model has running statistics, which every forward in training changes."""
    names = (name.rpartition(".")[2] for name in analysis.oracle.buffers)
    return len(analysis.steps) > 1 and any(name.startswith(("running_", "num_batches_")) for name in names)


AT_ONCE = "each forward updates the statistics twice: check whether it runs again, for example to find shapes"
IN_THE_BACKWARD = "each forward updates the statistics twice: check whether activations are recomputed in training mode"
FIRST_OF_A_BATCH = "a batch's first forward updates the statistics twice: check whether it runs again, to find shapes"


def updated_again(analysis: TraceAnalysis) -> str | None:
    """Return in words which forwards updated the buffers twice at every step; None if no repetition explains them.

    Ranks may run forwards in different orders, so each buffer is explained separately.
    """
    every = [list(_ways(analysis, index)) for index in range(len(analysis.steps) - 1)]
    if not every:
        return None
    fitting: dict[str, str] = {}
    for place, (words, *_) in enumerate(every[0]):
        fits = [_fitting(analysis, index, *ways[place][1:]) for index, ways in enumerate(every)]
        for name in set.intersection(*fits):
            fitting.setdefault(name, words)
    unexplained = analysis.steps[1].ranks[0].buffers.keys() & analysis.oracle.buffers.keys() - fitting.keys()
    # If a stage's backward follows its forward at once, several ways fit its buffers: the other stages' decide.
    return None if unexplained else max(fitting.values(), key=(AT_ONCE, FIRST_OF_A_BATCH, IN_THE_BACKWARD).index)


def _ways(analysis: TraceAnalysis, index: int) -> Iterator[tuple[str, list[Share], list[Share]]]:
    """Yield each way in words, a step's forwards with the repeated ones, and forwards before the next step's first.

    A forward is repeated at once, or in its backward, after the forwards with which a schedule starts. The recorded
    buffers of a step include updates by forwards before its first recorded one.
    """
    now, then = (own_shares(step.ranks[0]) for step in analysis.steps[index : index + 2])
    size = analysis.cell.parallelism.micro_batches
    batches = [now[first : first + size] for first in range(0, len(now), size)]
    for words, order in (
        (AT_ONCE, [share for one in now for share in (one, one)]),
        (FIRST_OF_A_BATCH, [share for batch in batches for share in (*batch[:1], *batch)]),
    ):
        yield words, order, []
        yield words, order[1:], then[:1]
    for early in range(1, size + 1):
        yield IN_THE_BACKWARD, [share for batch in batches for share in _recomputed(batch, early)], []


def _recomputed(batch: Sequence[Share], early: int) -> list[Share]:
    order = list(batch[:early])
    for index, share in enumerate(batch):
        order += [*batch[index + early : index + early + 1], share]
    return order


def _fitting(analysis: TraceAnalysis, index: int, shares: list[Share], ahead: list[Share]) -> set[str]:
    """Return the buffers that these forwards of a step and of the next one explain."""
    before, after = (step.ranks[0] for step in analysis.steps[index : index + 2])
    size = analysis.cell.parallelism.micro_batches
    exact, rough = (
        buffers_after(oracle, replace(after, buffers=buffers_after(oracle, before, shares, size)), ahead, size)
        for oracle in (analysis.oracle, analysis.cell_oracle)
    )
    found = after.buffers
    return {n for n in found if n in exact and buffer_error(found[n], exact[n], rough[n], analysis) <= limit()}
