"""Why an evaluation is not what was due: hypotheses about when it happened, and about what was drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.core.finding import Finding
from harness.evidence.trace import Evaluation
from harness.judge.causes.cause import Cause, explained
from harness.judge.oracle.epochs import Position, evaluations_due, position_of
from harness.judge.trace_analysis import TraceAnalysis


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about evaluations with a cause: the first hypothesis that the evidence does not refute."""
    every = [trace.evaluations for trace in analysis.trace.ranks]
    return explained(
        finding,
        _never(every),
        _in_training_mode(analysis),
        _other_rhythm(analysis),
        _other_samples(analysis),
        _only_some_ranks(analysis),
        _ranks_alike(every, analysis),
        _tail_dropped(analysis),
    )


def _never(ranks: Sequence[Sequence[Evaluation]]) -> Cause | None:
    if any(ranks):
        return None
    look = "job.validate_every says after how many batches val_dataset is to be evaluated"
    return Cause("never-evaluated", "metrics", look)


def _in_training_mode(analysis: TraceAnalysis) -> Cause | None:
    """Where there are running statistics it is these that suffer, and else the figures."""
    for evaluation in _all(analysis):
        if evaluation.training:
            family = "buffers" if analysis.oracle.buffers else "metrics"
            look = "call model.eval() before it and model.train() after it"
            return Cause("evaluated-in-training-mode", family, look, step=evaluation.step)
    return None


def _other_rhythm(analysis: TraceAnalysis) -> Cause | None:
    found = {
        position_of(analysis, evaluation.step, evaluation.micro_batches, trace.rank)
        for trace in analysis.trace.ranks
        for evaluation in trace.evaluations
    }
    if all(found & set(where) for where in evaluations_due(analysis)):
        return None
    for name, look, places in _rhythms(analysis):
        if places and len(found) == len(places) and all(found & set(where) for where in places):
            return Cause(name, "metrics", look)
    return Cause("evaluations-missing", "metrics", "some evaluations are left out, or come at another moment")


def _rhythms(analysis: TraceAnalysis) -> Iterator[tuple[str, str, list[tuple[Position, ...]]]]:
    """Yield other ways to count until the next evaluation, and where it then happens."""
    division, every = analysis.epochs, analysis.workload.validate_every or 1
    batches, epochs, windows = division.batches, division.count, division.windows
    ends = [division.after_batch(epoch, batches) for epoch in range(epochs)]
    yield "evaluated-once-an-epoch", "it is due inside of epochs too", ends
    counted = [divmod(number - 1, batches) for number in range(every, epochs * batches + 1, every)]
    counted_on = [division.after_batch(epoch, batch + 1) for epoch, batch in counted]
    yield "batches-counted-over-epochs", "batches are counted from the start of each epoch", counted_on
    steps: list[tuple[Position, ...]] = [((step, 0),) for step in range(every, epochs * windows + 1, every)]
    yield "steps-counted", "it is batches that count, not optimizer steps", steps
    steps = [((epoch * windows + step, 0),) for epoch in range(epochs) for step in range(every, windows + 1, every)]
    yield "steps-counted", "it is batches that count, not optimizer steps", steps
    look = "a window is not waited for: evaluate in the middle of it"
    deferred = {(step + (micro_batches > 0), 0) for (step, micro_batches), *_ in evaluations_due(analysis)}
    yield "waits-for-the-step", look, [(where,) for where in sorted(deferred)]
    early = [
        division.after_batch(epoch, batch) if batch else ((epoch * windows, 0),)
        for epoch in range(epochs)
        for batch in range(0, batches, every)
    ]
    yield "evaluated-ahead", "it is due after so many batches, not before the first", early
    shifted = [division.after_batch(epoch, batch) for epoch in range(epochs) for batch in range(1, batches + 1, every)]
    yield "evaluated-ahead", "it is due after so many batches, not after the first", shifted


def _other_samples(analysis: TraceAnalysis) -> Cause | None:
    count = len(analysis.workload.val_dataset(analysis.devices))
    for evaluation in _all(analysis):
        if any(not 0 <= i < count for i in evaluation.samples):
            look = "is it val_dataset that is evaluated?"
            return Cause("evaluates-another-dataset", "data", look, step=evaluation.step)
    return None


def _only_some_ranks(analysis: TraceAnalysis) -> Cause | None:
    idle = [trace.rank for trace in analysis.trace.ranks if not trace.evaluations]
    if not idle:
        return None
    look = f"ranks {idle} do not evaluate, and the others only their shares"
    return Cause("only-some-ranks-evaluate", "data", look, rank=idle[0])


def _ranks_alike(ranks: Sequence[Sequence[Evaluation]], analysis: TraceAnalysis) -> Cause | None:
    count = len(analysis.workload.val_dataset(analysis.devices))
    drawn = {tuple(sorted(set(evaluations[0].samples))) for evaluations in ranks if evaluations}
    if len(ranks) > 1 and len(drawn) == 1 and len(next(iter(drawn))) < count:
        look = "all ranks evaluate the same part: was the sampler told its rank?"
        return Cause("ranks-evaluate-alike", "data", look)
    return None


def _tail_dropped(analysis: TraceAnalysis) -> Cause | None:
    count = len(analysis.workload.val_dataset(analysis.devices))
    for evaluation in _all(analysis):
        seen = {i for other in _all(analysis) for i in other.samples if other.step == evaluation.step}
        if 0 < len(seen) < count:
            tail = sorted(seen) == list(range(len(seen)))
            look = (
                "the last batch, or what no share has room for, is dropped" if tail else "which shares are evaluated?"
            )
            name = "tail-dropped" if tail else "held-out-samples-missing"
            return Cause(name, "data", look, step=evaluation.step)
    return None


def _all(analysis: TraceAnalysis) -> list[Evaluation]:
    every = [evaluation for trace in analysis.trace.ranks for evaluation in trace.evaluations]
    return sorted(every, key=lambda evaluation: (evaluation.step, evaluation.micro_batches))
