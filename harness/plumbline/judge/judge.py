"""From a trace to findings."""

from __future__ import annotations

from dataclasses import replace

import torch

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding, in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.evidence.trace import Trace
from plumbline.judge.causes.launch import LaunchCase
from plumbline.judge.causes.registry import explain
from plumbline.judge.checks import CHECKS, run_check, run_checks
from plumbline.judge.checks.launch import details, launch, with_hung_ranks
from plumbline.judge.consequences import mark_consequences
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import Workload

BY_STEP, OVER_ALL = ("gradients", "update", "training"), ("buffers", "metrics", "checkpoint")
"""The checks that have nothing to compare once numbers are out of range; those by step are judged until then."""


def judge(trace: Trace, workload: Workload, cell: Cell, behavior: TrainingBehavior = ORDINARY) -> tuple[Finding, ...]:
    """Run every check on the trace of a subject that declared ``behavior``.

    Findings are in reading order: root causes before their consequences. The same trace gives the same findings,
    whatever the state of the global RNG.

    A trace that is not whole (a rank raised, crashed or hung) is not judged further: the finding says how the launch
    ended.
    """
    broken = launch(trace, cell)
    if broken is not None:
        explained = explain(broken, LaunchCase(broken, trace, cell))
        return (replace(explained, message=f"{explained.message}\n{details(broken, trace)}".strip()),)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        analysis = TraceAnalysis(trace, workload, cell, behavior)
        findings = run_checks(analysis)
        if any(map(_is_of_numbers, findings)) and (step := _diverged_at(analysis)) is not None:
            until = TraceAnalysis(_until(trace, step), workload, cell, behavior)
            findings = [_before(step, one, until) if _is_of_numbers(one) else one for one in findings]
    return tuple(
        in_reading_order(mark_consequences(with_hung_ranks(tuple(findings), trace) if trace.hung else findings))
    )


def _is_of_numbers(finding: Finding) -> bool:
    """Return whether a finding accuses numbers that one device may not be able to hold either."""
    return finding.check in (*BY_STEP, *OVER_ALL) and finding.outcome.is_bad


def _diverged_at(analysis: TraceAnalysis) -> int | None:
    """Return the step from which on numbers are out of range, None where there is none or the evidence cannot tell."""
    try:
        return analysis.diverged_at
    except Exception:  # evidence with which nothing can be computed: the checks have said so
        return None


def _before(step: int, finding: Finding, until: TraceAnalysis) -> Finding:
    if finding.check in BY_STEP:
        for earlier in run_check(finding.check, CHECKS[TraceAnalysis][finding.check], until):
            if earlier.outcome is Outcome.FAILED:
                return earlier
    vacuous = (
        f"vacuous: the training diverges: at step {step} the gradient of one device, or the norm that clips it, is not "
        f"finite in precision {until.cell.precision} either; lower the learning rate, or clip"
    )
    return Finding(finding.check, Outcome.ERRORED, vacuous, step=step)


def _until(trace: Trace, step: int) -> Trace:
    return replace(trace, ranks=tuple(replace(rank, steps=rank.steps[:step]) for rank in trace.ranks))
