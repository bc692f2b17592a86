"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.buffer_replay import buffer_errors, changed, must_change
from plumbline.judge.causes.repeated_forwards import updated_again
from plumbline.judge.checks.own_buffers import own_buffers
from plumbline.judge.findings import Vacuous, error_at, failed, from_deviation
from plumbline.judge.oracle.noise import Deviation, larger, limit
from plumbline.judge.trace_analysis import TraceAnalysis, same


def buffers(analysis: TraceAnalysis) -> Finding | None:
    """All ranks begin each step's forward with the same buffers: those that the first device computed.

    They may differ after a forward, because DDP broadcasts them before the next one. None if the model has no buffers.
    If a subject declares that each rank keeps its own buffers, the rank's own samples decide.
    """
    if not analysis.steps or not analysis.steps[0].ranks[0].buffers:
        return None
    if analysis.behavior.own_buffers and analysis.world > 1:
        return own_buffers(analysis)
    for global_step in analysis.steps:
        first = global_step.ranks[0].buffers
        for rank, step in enumerate(global_step.ranks):
            if not same(step.buffers, first):
                return failed(
                    "buffers",
                    "buffers are not broadcast before the forward (if that is intended, declare buffers='per-rank'): "
                    "the forward started with other values than on rank 0",
                    cause="buffers-not-broadcast",
                    family="buffers",
                    step=global_step.index,
                    rank=rank,
                    parameter=next((n for n, value in step.buffers.items() if not _equal(value, first.get(n))), None),
                )
    worst = _replay(analysis)
    if worst.x_noise <= limit() and analysis.is_staged and (found := _begun_otherwise(analysis)) is not None:
        return found
    if worst.x_noise <= limit():
        message = f"buffers are those of the first device: {error_at(worst, limit())}"
        return from_deviation("buffers", Outcome.PASSED, message, worst)
    message = f"buffers are not those of the first device: {error_at(worst, limit())}"
    again = updated_again(analysis)
    finding = from_deviation("buffers", Outcome.FAILED, message if again is None else f"{message}: {again}", worst)
    cause = "buffers-updated-otherwise" if again is None else "statistics-updated-again"
    return replace(finding, cause=cause, family="buffers")


def _begun_otherwise(analysis: TraceAnalysis) -> Finding | None:
    job = analysis.workload.model(analysis.cell_oracle.dtype)
    for name, right in job.named_buffers():
        rank = analysis.buffer_holder(0, name)
        found = None if rank is None else analysis.steps[0].ranks[0].buffers[name]
        if found is not None and not torch.equal(found, right.to(found.dtype)):
            return failed(
                "buffers",
                "the first forward started with other buffers than the job's (do not run the model in training mode "
                "before, for example to find shapes)",
                cause="statistics-updated-again",
                family="buffers",
                step=0,
                rank=rank,
                parameter=name,
            )
    return None


def _replay(analysis: TraceAnalysis) -> Deviation:
    """Replay the first rank's forwards from each step's buffers to the next step's, and return the largest error."""
    worst: dict[str, Deviation] = {}
    any_changed = False
    for global_step, following in pairwise(analysis.steps):
        any_changed = any_changed or changed(global_step, following, 0)
        for way, deviation in buffer_errors(analysis, global_step, following, 0):
            holder = analysis.buffer_holder(global_step.index, deviation.parameter) if analysis.is_staged else None
            worst[way] = larger(worst.get(way), replace(deviation, rank=holder))
    if not any_changed and must_change(analysis):
        raise Vacuous("no buffer changed from step to step")
    return min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))


def _equal(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    return right is not None and torch.equal(left, right)
