"""Did the optimizer step as often as the workload says?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes import explain
from harness.judge.causes.step_count import StepCountCase
from harness.judge.error_outcome import Vacuous
from harness.judge.trace_analysis import TraceAnalysis


def steps(analysis: TraceAnalysis) -> Finding:
    """Every rank attempts epochs × windows of an epoch steps, the short last window included."""
    expected = analysis.steps_due
    if not analysis.taken:
        raise Vacuous("no optimizer step was seen on every rank, so there is nothing to compare")
    for trace in analysis.trace.ranks:
        if len(trace.steps) != expected:
            message = f"rank {trace.rank} took {len(trace.steps)} optimizer steps, not {expected}"
            finding = Finding("steps", Outcome.FAILED, message, family="data", rank=trace.rank)
            return explain(finding, StepCountCase(analysis))
    return Finding("steps", Outcome.PASSED, f"{expected} optimizer steps on every rank")
