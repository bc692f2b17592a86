"""From a trace to findings."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.training_behavior import ORDINARY, TrainingBehavior
from harness.evidence.trace import Trace
from harness.judge.causes import explain
from harness.judge.causes.launch import LaunchCase
from harness.judge.causes.step_count import VacuousCase
from harness.judge.checks import CHECKS, Check
from harness.judge.checks.launch import details, launch
from harness.judge.consequences import in_order
from harness.judge.error_outcome import Vacuous
from harness.judge.reconstruct import followed
from harness.judge.teardown import of_hung
from harness.judge.trace_analysis import TraceAnalysis
from harness.workloads import Workload


def judge(trace: Trace, workload: Workload, cell: Cell, conduct: TrainingBehavior = ORDINARY) -> tuple[Finding, ...]:
    """Put every question to the trace of a subject that declared ``conduct``.

    Findings are in reading order: root causes before their consequences.

    The same trace gives the same findings, whatever the global RNG holds.

    Evidence that is not whole (a rank raised, died or hung) is not judged further: the finding says what became
    of the launch.
    """
    broken = launch(trace, cell)
    if broken is not None:
        told = explain(broken, LaunchCase(broken, trace, cell))
        return (replace(told, message=f"{told.message}\n{details(broken, trace)}".strip()),)
    try:
        trace = followed(trace, workload, cell, conduct)
    except Exception as error:
        return (Finding("launch", Outcome.ERRORED, f"evidence cannot be followed: {_raised(error)}"),)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        analysis = TraceAnalysis(trace, workload, cell, conduct)
        findings = [_ask(name, check, analysis) for name, check in CHECKS.items()]
    asked = tuple(finding for finding in findings if finding is not None)
    return in_order(of_hung(asked, trace) if trace.hung else asked)


def _ask(name: str, check: Check, analysis: TraceAnalysis) -> Finding | None:
    try:
        return check(analysis)
    except Vacuous as reason:
        return explain(Finding(name, Outcome.ERRORED, f"vacuous: {reason}"), VacuousCase(analysis))
    except Exception as error:
        # A check that raises knows nothing: its verdict is unknown, not right.
        return Finding(name, Outcome.ERRORED, f"the check itself raised {_raised(error)}")


def _raised(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
