"""Was the model evaluated when it was due, on every held-out sample, and in evaluation mode?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Evaluation
from harness.judge.batch_positions import Place, due, place
from harness.judge.causes import explain
from harness.judge.causes.validation import EvaluationCase
from harness.judge.trace_analysis import TraceAnalysis


def validation(analysis: TraceAnalysis) -> Finding | None:
    """At each due place the ranks together forward every held-out sample, without gradients, in evaluation mode.

    Who evaluates what is theirs to divide: all have a share, each has everything, or one does it alone. Samples that
    fill up a batch, and evaluations that nobody asked for, are no mistake: whether they are left out of the figures is
    asked of these. None where none is due, and where the steps, of which ``steps`` says why, give no place for them.
    """
    workload = analysis.workload
    places = list(due(analysis))
    if not places:
        return None
    if not any(trace.evaluations for trace in analysis.trace.ranks):
        return explain(_failed(f"{len(places)} evaluations were due, and there was none"), EvaluationCase(analysis))
    if len(analysis.moments) != analysis.steps_due:
        return None
    expected = len(workload.val_dataset(analysis.devices))
    for number, where in enumerate(places):
        evaluations = evaluated(analysis, where)
        problem = _problem(evaluations, expected)
        if problem:
            step = max(where[0][0] - 1, 0) if not where[0][1] else where[0][0]
            message = f"evaluation {number} of {len(places)}, due {_words(where)}: {problem}"
            return explain(_failed(message, step), EvaluationCase(analysis))
    return Finding("validation", Outcome.PASSED, f"{len(places)} evaluations, each of {expected} held-out samples")


def evaluated(analysis: TraceAnalysis, where: tuple[Place, ...]) -> list[Evaluation]:
    """Return the evaluations at a place, of all ranks; with a loss of the subject's own any place of its step will do.

    Such a loss says nothing of micro-batches.
    """
    found = []
    for trace in analysis.trace.ranks:
        exact = all(micro.loss is not None for step in trace.steps for micro in step.micro_batches)
        for evaluation in trace.evaluations:
            here = place(analysis, evaluation.step, evaluation.micro_batches, trace.rank)
            if here in where or (not exact and here[0] in {step for step, _ in where}):
                found.append(evaluation)
    return found


def _problem(evaluations: list[Evaluation], expected: int) -> str | None:
    seen = {i for evaluation in evaluations for i in evaluation.samples}
    if not seen:
        return "the model was not evaluated"
    if any(evaluation.training for evaluation in evaluations):
        return "the model was in training mode"
    strangers = [i for i in seen if not 0 <= i < expected]
    if strangers:
        return f"sample {min(strangers)} was evaluated, which the held-out data does not have"
    if len(seen) < expected:
        return f"{expected - len(seen)} of {expected} held-out samples were not evaluated"
    return None


def _words(where: tuple[Place, ...]) -> str:
    step, micro_batches = where[0]
    return f"after {step} steps" + (f" and {micro_batches} micro-batches" if micro_batches else "")


def _failed(message: str, step: int | None = None) -> Finding:
    return Finding("validation", Outcome.FAILED, message, step=step)
