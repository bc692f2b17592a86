"""Where a subject declares that each rank keeps its own buffers: are they what the rank's own samples make?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Tensors
from harness.judge.error_outcome import Deviation, Vacuous, larger, times
from harness.judge.oracle.buffer_replay import after, error, errors, moves, own_shares, should_move
from harness.judge.oracle.noise import limit
from harness.judge.trace_analysis import NOISE_RUNS, GlobalStep, TraceAnalysis, same

Combined = Callable[[Sequence[Tensors]], Tensors]


def own_buffers(analysis: TraceAnalysis) -> Finding:
    """All ranks begin alike, and from then on each rank's forwards alone change its buffers: nothing is broadcast.

    That is not what one device computes, so it deviates where ranks have other buffers. A BatchNorm that shares its
    statistics has the same ones everywhere.
    """
    for rank, step in enumerate(analysis.steps[0].ranks):
        if not same(step.buffers, analysis.steps[0].ranks[0].buffers):
            message = f"rank {rank} began the first step with other buffers than rank 0"
            return Finding(
                "buffers", Outcome.FAILED, message, cause="buffers-begin-apart", family="buffers", step=0, rank=rank
            )
    worst: dict[str, Deviation] = {}
    moved = False
    for global_step, following in pairwise(analysis.steps):
        for rank in range(len(global_step.ranks)):
            moved = moved or moves(global_step, following, rank)
            for way, deviation in errors(analysis, global_step, following, rank):
                worst[way] = larger(worst.get(way), deviation)
    if not moved and should_move(analysis):
        raise Vacuous("no buffer changed from step to step")
    nearest = min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))
    if nearest.x_noise > limit(NOISE_RUNS):
        return _explained(worst["first device"], analysis)
    place = f"({times(nearest.x_noise)}, {nearest.where})"
    differ = any(not same(step.buffers, m.ranks[0].buffers) for m in analysis.steps for step in m.ranks[1:])
    message = f"buffers are those of one device {place}"
    if differ:
        message = f"buffers are each rank's own, of its own samples, as the subject declares {place}: not one device's"
    return Finding(
        "buffers",
        Outcome.DEVIATES if differ else Outcome.PASSED,
        message,
        error_x_noise=nearest.x_noise,
        step=nearest.step,
        parameter=nearest.parameter,
        rank=nearest.rank,
    )


def _first(own: Sequence[Tensors]) -> Tensors:
    return own[0]


def _mean(own: Sequence[Tensors]) -> Tensors:
    return {name: value / len(own) for name, value in _sum(own).items()}


def _sum(own: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([one[name].double() for one in own]).sum(0) for name in own[0]}


COMBINATIONS: tuple[tuple[str, str, Combined], ...] = (
    ("buffers-broadcast", "rank 0's: they are broadcast, so leave buffers='per-rank' out", _first),
    ("buffers-averaged", "the mean over the ranks", _mean),
    ("buffers-summed", "the sum over the ranks", _sum),
)


def _explained(worst: Deviation, analysis: TraceAnalysis) -> Finding:
    """Return what is wrong at the first step that is, with the combination of the ranks' own buffers that fits."""
    global_step, following, rank = _first_wrong(analysis)
    exact, rounded = (
        [after(oracle, step, own_shares(step)) for step in global_step.ranks]
        for oracle in (analysis.oracle, analysis.cell_oracle)
    )
    then = following.ranks[rank].buffers
    judged = [name for name in then if name in exact[0] and then[name].is_floating_point()]
    cause, told = "buffers-updated-otherwise", "something else than its forwards make of them"
    for name, words, combine in COMBINATIONS:
        right, rough = combine(exact), combine(rounded)
        if judged and all(error(then[n], right[n], rough[n], analysis) <= limit(NOISE_RUNS) for n in judged):
            cause, told = name, words
            break
    return Finding(
        "buffers",
        Outcome.FAILED,
        f"at step {following.index} the buffers of rank {rank} are not its own ({times(worst.x_noise)}): {told}",
        cause=cause,
        family="buffers",
        error_x_noise=worst.x_noise,
        step=following.index,
        parameter=worst.parameter,
        rank=rank,
    )


def _first_wrong(analysis: TraceAnalysis) -> tuple[GlobalStep, GlobalStep, int]:
    """Return the first step, and the first rank in it, whose forwards do not make the buffers that came next."""
    for global_step, following in pairwise(analysis.steps):
        for rank in range(len(global_step.ranks)):
            for way, deviation in errors(analysis, global_step, following, rank):
                if way == "first device" and deviation.x_noise > limit(NOISE_RUNS):
                    return global_step, following, rank
    raise AssertionError("an error that was found is found again")
