"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.checks.own_buffers import own_buffers
from harness.judge.error_outcome import Deviation, Vacuous, larger, times
from harness.judge.oracle.buffer_replay import errors, moves, should_move
from harness.judge.oracle.noise import limit
from harness.judge.trace_analysis import NOISE_RUNS, TraceAnalysis, same


def buffers(analysis: TraceAnalysis) -> Finding | None:
    """All ranks begin each step's forward with the same buffers, and these are what the first device made of them.

    They may differ after a forward: DDP broadcasts them at the next one. None where the model has no buffers. Of a
    subject that declares that each rank keeps its own, it is asked whether they are what the rank's own samples make.
    """
    if not analysis.steps or not analysis.steps[0].ranks[0].buffers:
        return None
    if analysis.behavior.own_buffers and analysis.cell.processes > 1:
        return own_buffers(analysis)
    for global_step in analysis.steps:
        for rank, step in enumerate(global_step.ranks):
            if not same(step.buffers, global_step.ranks[0].buffers):
                name = next(
                    (n for n, b in step.buffers.items() if not _equal(b, global_step.ranks[0].buffers.get(n))), None
                )
                return Finding(
                    "buffers",
                    Outcome.FAILED,
                    f"at step {global_step.index} rank {rank} began with another {name} than rank 0: "
                    "buffers are not broadcast before the forward (if that is on purpose, declare buffers='per-rank')",
                    cause="buffers-not-broadcast",
                    family="buffers",
                    step=global_step.index,
                    parameter=name,
                    rank=rank,
                )
    worst = _replay(analysis)
    good = worst.x_noise <= limit(NOISE_RUNS)
    return Finding(
        "buffers",
        Outcome.PASSED if good else Outcome.FAILED,
        f"buffers are {'those' if good else 'not those'} of the first device ({times(worst.x_noise)}, {worst.where})",
        cause=None if good else "buffers-updated-otherwise",
        family=None if good else "buffers",
        error_x_noise=worst.x_noise,
        step=worst.step,
        parameter=worst.parameter,
    )


def _replay(analysis: TraceAnalysis) -> Deviation:
    """Follow the first rank's forwards from each step's buffers to the next step's, and return the largest error."""
    worst: dict[str, Deviation] = {}
    moved = False
    for global_step, following in pairwise(analysis.steps):
        moved = moved or moves(global_step, following, 0)
        for way, deviation in errors(analysis, global_step, following, 0):
            worst[way] = larger(worst.get(way), replace(deviation, rank=None))
    if not moved and should_move(analysis):
        raise Vacuous("no buffer changed from step to step")
    return min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))


def _equal(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    return right is not None and torch.equal(left, right)
