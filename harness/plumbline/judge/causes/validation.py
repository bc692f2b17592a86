"""Why evaluations are not as required: hypotheses about when they happened, and which samples they used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from plumbline.evidence.trace import Evaluation
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.judge.expected_metrics import evaluations_due, position_of
from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.oracle.layout import Position

Positions = list[tuple[Position, ...]]
"""Where evaluations happen: for each evaluation all equivalent positions, such as before and after a step."""


class EvaluationCase(TraceCase):
    """A trace whose evaluations are not as required."""

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        every = [evaluation for trace in self.analysis.trace.ranks for evaluation in trace.evaluations]
        return sorted(every, key=lambda evaluation: (evaluation.step, evaluation.micro_batches))

    @cached_property
    def positions(self) -> set[Position]:
        """Where some rank evaluated."""
        return {
            position_of(self.analysis, evaluation.step, evaluation.micro_batches, trace.rank)
            for trace in self.analysis.trace.ranks
            for evaluation in trace.evaluations
        }

    @property
    def on_time(self) -> bool:
        return all(self.positions & set(where) for where in evaluations_due(self.analysis))

    @cached_property
    def held_out_size(self) -> int:
        return len(self.analysis.workload.val_dataset(self.analysis.devices))

    @property
    def every(self) -> int:
        return self.analysis.workload.validate_every or 1


EvaluationHypothesis = Hypothesis[EvaluationCase, Match]


def _in_training_mode(with_buffers: bool) -> Callable[[EvaluationCase], Iterator[Match]]:
    def predict(case: EvaluationCase) -> Iterator[Match]:
        first = next((evaluation for evaluation in case.evaluations if evaluation.training), None)
        if first is not None and bool(case.analysis.oracle.buffers) == with_buffers:
            yield Match(first.step)

    return predict


def _at(positions_of: Callable[[EvaluationCase], Iterator[Positions]]) -> Callable[[EvaluationCase], Iterator[Match]]:

    def predict(case: EvaluationCase) -> Iterator[Match]:
        if case.on_time:
            return
        for positions in positions_of(case):
            if (
                positions
                and len(case.positions) == len(positions)
                and all(case.positions & set(where) for where in positions)
            ):
                yield Match(figures={"every": case.every})

    return predict


def _once_an_epoch(case: EvaluationCase) -> Iterator[Positions]:
    epochs = case.analysis.epochs
    yield [epochs.after_batch(epoch, epochs.batches) for epoch in range(epochs.count)]


def _counted_over_epochs(case: EvaluationCase) -> Iterator[Positions]:
    epochs = case.analysis.epochs
    numbers = range(case.every, epochs.count * epochs.batches + 1, case.every)
    counted = [divmod(number - 1, epochs.batches) for number in numbers]
    yield [epochs.after_batch(epoch, batch + 1) for epoch, batch in counted]


def _steps_counted(case: EvaluationCase) -> Iterator[Positions]:
    epochs, every = case.analysis.epochs, case.every
    yield [((step, 0),) for step in range(every, epochs.count * epochs.windows + 1, every)]
    yield [
        ((epoch * epochs.windows + step, 0),)
        for epoch in range(epochs.count)
        for step in range(every, epochs.windows + 1, every)
    ]


def _after_the_step(case: EvaluationCase) -> Iterator[Positions]:
    deferred = {(step + (micro_batches > 0), 0) for (step, micro_batches), *_ in evaluations_due(case.analysis)}
    yield [(where,) for where in sorted(deferred)]


def _ahead(case: EvaluationCase) -> Iterator[Positions]:
    epochs, every = case.analysis.epochs, case.every
    yield [
        epochs.after_batch(epoch, batch) if batch else ((epoch * epochs.windows, 0),)
        for epoch in range(epochs.count)
        for batch in range(0, epochs.batches, every)
    ]
    yield [
        epochs.after_batch(epoch, batch)
        for epoch in range(epochs.count)
        for batch in range(1, epochs.batches + 1, every)
    ]


def _missing(case: EvaluationCase) -> Iterator[Match]:
    positions = list(evaluations_due(case.analysis))
    if missing := [where for where in positions if not case.positions & set(where)]:
        yield Match(figures={"missing": len(missing), "due": len(positions)})


def _another_dataset(case: EvaluationCase) -> Iterator[Match]:
    for evaluation in case.evaluations:
        for i in evaluation.samples:
            if not 0 <= i < case.held_out_size:
                yield Match(evaluation.step, figures={"sample": i, "count": case.held_out_size})


def _only_some_ranks(case: EvaluationCase) -> Iterator[Match]:
    idle = [trace.rank for trace in case.analysis.trace.ranks if not trace.evaluations]
    if idle:
        yield Match(rank=idle[0], figures={"idle": ranks_in_words(idle)})


def _ranks_alike(case: EvaluationCase) -> Iterator[Match]:
    ranks = [trace.evaluations for trace in case.analysis.trace.ranks]
    drawn = {tuple(sorted(set(evaluations[0].samples))) for evaluations in ranks if evaluations}
    if len(ranks) > 1 and len(drawn) == 1 and len(part := drawn.pop()) < case.held_out_size:
        yield Match(figures={"part": len(part), "count": case.held_out_size})


def _samples_missing(case: EvaluationCase) -> Iterator[tuple[list[int], Match]]:
    """Yield the samples that all ranks evaluated at a position, sorted, if some are missing."""
    for evaluation in case.evaluations:
        seen = {i for other in case.evaluations for i in other.samples if other.step == evaluation.step}
        if 0 < len(seen) < case.held_out_size:
            figures = {"missing": case.held_out_size - len(seen), "count": case.held_out_size}
            yield sorted(seen), Match(evaluation.step, figures=figures)


def _tail_dropped(case: EvaluationCase) -> Iterator[Match]:
    first = next(_samples_missing(case), None)
    if first is not None and first[0] == list(range(len(first[0]))):
        yield first[1]


_MODE = (
    "training mode updates running statistics, and dropout changes the loss",
    "call model.eval() before it and model.train() after it",
)

register(
    EvaluationCase,
    EvaluationHypothesis("never-evaluated", "metrics", holds(lambda case: not case.evaluations),
        "no rank evaluated the model",
        "evaluate val_dataset after every job.validate_every batches", 190),
    EvaluationHypothesis("evaluated-in-training-mode", "buffers", _in_training_mode(True), *_MODE, 180),
    EvaluationHypothesis("evaluated-in-training-mode", "metrics", _in_training_mode(False), *_MODE, 175),
    EvaluationHypothesis("evaluated-once-an-epoch", "metrics", _at(_once_an_epoch),
        "the model was evaluated once per epoch",
        "evaluate within epochs too", 170),
    EvaluationHypothesis("batches-counted-over-epochs", "metrics", _at(_counted_over_epochs),
        "the count of batches continued from one epoch into the next",
        "restart the count at the start of each epoch", 165),
    EvaluationHypothesis("steps-counted", "metrics", _at(_steps_counted),
        "the model was evaluated after every {every} optimizer steps",
        "evaluate after every {every} batches", 160),
    EvaluationHypothesis("waits-for-the-step", "metrics", _at(_after_the_step),
        "evaluations came only after the window's optimizer step",
        "evaluate in the middle of the window", 155),
    EvaluationHypothesis("evaluated-ahead", "metrics", _at(_ahead),
        "the first evaluation came before the first batch, or right after it",
        "evaluate after every {every} batches", 150),
    EvaluationHypothesis("evaluations-missing", "metrics", _missing,
        "{missing} of {due} evaluations are missing, or come at a different time",
        "check how the trainer counts until the next evaluation", 145),
    EvaluationHypothesis("evaluates-another-dataset", "data", _another_dataset,
        "sample {sample} was evaluated, but there are {count} held-out samples",
        "evaluate job.val_dataset", 140),
    EvaluationHypothesis("only-some-ranks-evaluate", "data", _only_some_ranks,
        "{idle} did not evaluate, and the others evaluated only their shares",
        "let every rank evaluate its share, or one rank all samples", 130),
    EvaluationHypothesis("ranks-evaluate-alike", "data", _ranks_alike,
        "all ranks evaluate the same {part} of {count} samples",
        "pass the rank to the sampler", 120),
    EvaluationHypothesis("tail-dropped", "data", _tail_dropped,
        "the last {missing} of {count} held-out samples are not evaluated",
        "check whether the last batch, or samples that do not fill every rank's share, are dropped", 115),
    EvaluationHypothesis("held-out-samples-missing", "data",
        lambda case: [match for _, match in _samples_missing(case)],
        "{missing} of {count} held-out samples are not evaluated",
        "check which shares are evaluated, and by which ranks", 110),
)  # fmt: skip
