"""Did the optimizer step as often as the workload requires?"""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.judge.causes.step_count import StepCountCase
from plumbline.judge.findings import Vacuous, failed, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.trace_analysis import TraceAnalysis


def steps(analysis: TraceAnalysis) -> Finding:
    """Every rank must attempt one step for each window of every epoch, including the short last window."""
    expected = analysis.steps_due
    if not analysis.steps_taken and not (analysis.is_staged and any(trace.steps for trace in analysis.recorded.ranks)):
        raise Vacuous("no optimizer step was taken on all ranks, so there is nothing to compare")
    for trace in analysis.recorded.ranks:
        if len(trace.steps) != expected:
            message = f"{_counted(len(trace.steps))} instead of {expected}"
            return explain(failed("steps", message, family="data", rank=trace.rank), StepCountCase(analysis))
    return passed("steps", f"{_counted(expected)} on every rank")


def _counted(steps: int) -> str:
    return f"{steps} optimizer step{'s' if steps != 1 else ''}"
