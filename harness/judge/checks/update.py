"""Did the optimizer do with the gradient what the workload's optimizer does?"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import RankTrace
from harness.judge.causes import explain
from harness.judge.causes.update import update_case
from harness.judge.error_outcome import Deviation, Vacuous, by_parameter, larger, single
from harness.judge.oracle.noise import limit
from harness.judge.oracle.update_replay import replay
from harness.judge.trace_analysis import DRAWS, TraceAnalysis, same


def update(analysis: TraceAnalysis) -> Finding:
    """Replay the subject's own gradients through the workload's optimizer and compare the weights after each step.

    The optimizer's state is the replay's own, fed with the subject's gradients, so that a lost state shows.
    Noise is what the same replay in the cell's storage precision differs by, at least one rounding.
    """
    if not analysis.taken:
        raise Vacuous("no optimizer step was seen on every rank")
    if not any(
        not torch.equal(step.before[name], step.after[name])
        for moment in analysis.taken
        for step in moment.ranks
        for name in step.after
    ):
        raise Vacuous("no weight moved at any step")
    errors: list[Deviation] = []
    judged: list[RankTrace] = []
    for trace in analysis.trace.ranks:
        if any(_same_history(trace, other) for other in judged):
            continue
        judged.append(trace)
        errors += replay(trace, analysis)
    worst = functools.reduce(larger, errors, Deviation(0.0))
    finding = single(
        "update",
        "weights after the step",
        "what the optimizer makes of the gradients",
        worst,
        0.0 if analysis.exact else limit(DRAWS),
    )
    if finding.outcome is not Outcome.FAILED:
        return finding
    there = [error for error in errors if (error.step, error.rank) == (worst.step, worst.rank)]
    finding = replace(finding, parameters=by_parameter(there))
    case = update_case(finding, analysis)
    return finding if case is None else explain(finding, case)


def _same_history(left: RankTrace, right: RankTrace) -> bool:
    return len(left.steps) == len(right.steps) and all(
        same(a.before, b.before) and same(a.gradients, b.gradients) and same(a.after, b.after)
        for a, b in zip(left.steps, right.steps, strict=True)
    )
