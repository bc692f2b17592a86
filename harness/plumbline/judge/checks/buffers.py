"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.judge.buffer_replay import buffer_errors, changed, must_change
from plumbline.judge.causes.repeated_forwards import updated_again
from plumbline.judge.checks.own_buffers import own_buffers
from plumbline.judge.findings import Vacuous, error_at, failed, failed_with_hint, from_deviation
from plumbline.judge.oracle.noise import Deviation, larger, limit
from plumbline.judge.trace_analysis import TraceAnalysis, same

CHECK = "buffers"


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
                names = [name for name in step.buffers if not _equal(step.buffers[name], first.get(name))]
                hint = "broadcast them before each forward, or declare buffers='per-rank' if that is intended"
                return not_broadcast(names, len(first), rank, hint, step=global_step.index)
    worst = _replay(analysis)
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
