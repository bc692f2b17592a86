"""From a trace to findings."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.evidence.trace import Trace
from plumbline.judge.causes.launch import LaunchCase
from plumbline.judge.causes.registry import explain
from plumbline.judge.causes.step_count import VacuousCase
from plumbline.judge.checks import CHECKS, Check
from plumbline.judge.checks.launch import details, launch, with_hung_ranks
from plumbline.judge.consequences import in_order
from plumbline.judge.findings import Vacuous
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
        answers = [_run(name, check, analysis) for name, check in CHECKS.items()]
        if any(map(_is_of_numbers, answers)) and (step := _diverged_at(analysis)) is not None:
            answers = _of_a_divergence(answers, analysis, step)
    findings = tuple(finding for finding in answers if finding is not None)
    return in_order(with_hung_ranks(findings, trace) if trace.hung else findings)


def _run(name: str, check: Check, analysis: TraceAnalysis) -> Finding | None:
    try:
        return check(analysis)
    except Vacuous as reason:
        return explain(Finding(name, Outcome.ERRORED, f"vacuous: {reason}"), VacuousCase(analysis))
    except Exception as error:
        # A check that raises has no verdict.
        return Finding(name, Outcome.ERRORED, f"the check itself raised {_raised(error)}")


def _is_of_numbers(finding: Finding | None) -> bool:
    """Return whether a finding accuses numbers that one device may not be able to hold either."""
    return finding is not None and finding.check in (*BY_STEP, *OVER_ALL) and finding.outcome.is_bad


def _diverged_at(analysis: TraceAnalysis) -> int | None:
    """Return the step from which on numbers are out of range, None where there is none or the evidence cannot tell."""
    try:
        return analysis.diverged_at
    except Exception:  # evidence with which nothing can be computed: the checks have said so
        return None


def _of_a_divergence(answers: Sequence[Finding | None], analysis: TraceAnalysis, step: int) -> list[Finding | None]:
    """Return the findings of a training that is out of range from a step on: numbers are judged before it alone."""
    until = TraceAnalysis(_until(analysis.whole_trace, step), analysis.workload, analysis.cell, analysis.behavior)
    vacuous = (
        f"vacuous: the training diverges: at step {step} the gradient of one device, or the norm that clips it, is not "
        f"finite in precision {analysis.cell.precision} either; lower the learning rate, or clip"
    )
    judged: list[Finding | None] = []
    for finding in answers:
        if finding is not None and _is_of_numbers(finding):
            earlier = _run(finding.check, CHECKS[finding.check], until) if finding.check in BY_STEP else None
            if earlier is None or earlier.outcome is not Outcome.FAILED:
                earlier = Finding(finding.check, Outcome.ERRORED, vacuous, step=step)
            finding = earlier
        judged.append(finding)
    return judged


def _until(trace: Trace, step: int) -> Trace:
    return replace(trace, ranks=tuple(replace(rank, steps=rank.steps[:step]) for rank in trace.ranks))


def _raised(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
