"""Was the model evaluated when it was due, on every held-out sample, and in evaluation mode?"""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.evidence.trace import Evaluation
from plumbline.judge.causes.validation import EvaluationCase
from plumbline.judge.expected_metrics import evaluations_due, position_of
from plumbline.judge.findings import failed, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.layout import Position
from plumbline.judge.trace_analysis import TraceAnalysis


def validation(analysis: TraceAnalysis) -> Finding | None:
    """At each due position the ranks together forward every held-out sample, without gradients, in evaluation mode.

    They may divide the samples in any way: into shares, all on each rank, or all on one rank. Samples that fill up a
    batch, and additional evaluations, are allowed here; the check of metrics judges whether they are counted. None if
    no evaluation is due, or if the number of steps is wrong, which ``steps`` reports.
    """
    workload = analysis.workload
    due = list(evaluations_due(analysis))
    if not due:
        return None
    if not any(trace.evaluations for trace in analysis.trace.ranks):
        message = f"{len(due)} evaluations were due, but the model was never evaluated"
        return explain(failed("validation", message), EvaluationCase(analysis))
    if len(analysis.steps) != analysis.steps_due:
        return None
    expected = len(workload.val_dataset(analysis.devices))
    for number, positions in enumerate(due, 1):
        problem = _problem(evaluated(analysis, positions), expected)
        if problem:
            steps, micro_batches = positions[0]
            message = f"{problem} in evaluation {number} of {len(due)}, due after {_position(steps, micro_batches)}"
            step = steps if micro_batches else max(steps - 1, 0)
            return explain(failed("validation", message, step=step), EvaluationCase(analysis))
    return passed("validation", f"{len(due)} evaluations, each of {expected} held-out samples")


def evaluated(analysis: TraceAnalysis, positions: tuple[Position, ...]) -> list[Evaluation]:
    """Return all ranks' evaluations at one of ``positions``, or in its step if micro-batches were not recorded.

    Only the loss tells micro-batches apart, so they are not recorded if the subject has its own loss function.
    """
    found = []
    for trace in analysis.trace.ranks:
        recorded = all(micro.loss is not None for step in trace.steps for micro in step.micro_batches)
        for evaluation in trace.evaluations:
            position = position_of(analysis, evaluation.step, evaluation.micro_batches, trace.rank)
            if position in positions or (not recorded and position[0] in {step for step, _ in positions}):
                found.append(evaluation)
    return found


def _problem(evaluations: list[Evaluation], expected: int) -> str | None:
    seen = {i for evaluation in evaluations for i in evaluation.samples}
    if not seen:
        return "the model was not evaluated"
    if any(evaluation.training for evaluation in evaluations):
        return "the model was in training mode"
    unknown = [i for i in seen if not 0 <= i < expected]
    if unknown:
        return f"sample {min(unknown)}, which is not in the held-out data, was evaluated"
    if len(seen) < expected:
        return f"{expected - len(seen)} of {expected} held-out samples were not evaluated"
    return None


def _position(steps: int, micro_batches: int) -> str:
    micro = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return counted(steps, "step") + (f" and {micro}" if micro_batches else "")
