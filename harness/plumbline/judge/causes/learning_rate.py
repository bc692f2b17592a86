"""Why steps used other learning rates: each hypothesis predicts the sequence of rates that a rank would have used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from plumbline.core.numbers import counted
from plumbline.evidence.trace import Trace
from plumbline.evidence.training_record import StepRecord, TrainingRecord
from plumbline.judge.hypothesis import Evidence, Hypothesis, Match, holds, register
from plumbline.judge.trace_analysis import TraceAnalysis

Rates = tuple[float, ...]
"""The learning rate of each parameter group at one step."""

PRECISION = 1e-9
"""Rates whose relative difference is smaller are the same number, computed in different ways."""


@dataclass(frozen=True, eq=False)
class LearningRateCase(Evidence):
    """The learning rates of one rank of any training. A hypothesis yields rates, or the match itself."""

    training: TrainingRecord
    rank: int

    @cached_property
    def steps(self) -> Mapping[int, Sequence[StepRecord]]:
        """The steps of each rank, skipped ones included."""
        found: dict[int, list[StepRecord]] = {}
        for one in self.training.optimizer_steps:
            found.setdefault(one.rank, []).append(one)
        return found

    @cached_property
    def used(self) -> list[Rates]:
        return self.of_rank(self.rank)

    def of_rank(self, rank: int) -> list[Rates]:
        return [step.learning_rates for step in self.steps[rank]]

    @property
    def ranks_differ(self) -> bool:
        return any(self.of_rank(rank) != self.used for rank in self.steps)

    @property
    def attempts(self) -> list[int]:
        """The index of each step that was taken, among all attempts."""
        return [attempt for attempt, step in enumerate(self.steps[self.rank]) if not step.skipped]

    def scheduled(self, positions: Sequence[int]) -> Iterator[list[Rates]]:
        """Yield the schedule's rates at positions, counted in scheduler steps; nothing if the schedule is not known."""
        yield from ()

    def match(self, hypothesis: LearningRateHypothesis) -> Match | None:
        for predicted in hypothesis.predict(self):
            if isinstance(predicted, Match):
                return predicted
            if same_rates(self.used, predicted):
                return Match()
        return None


@dataclass(frozen=True, eq=False)
class ScheduleCase(LearningRateCase):
    """The learning rates of one rank of a subject, whose workload has a schedule."""

    training: TraceAnalysis

    @property
    def analysis(self) -> TraceAnalysis:
        return self.training

    @property
    def trace(self) -> Trace:
        """The trace of every rank whose rates are judged, also if several ranks hold one model together."""
        return self.analysis.recorded

    @cached_property
    def steps(self) -> Mapping[int, Sequence[StepRecord]]:
        """The steps of each rank, including ranks without parameters."""
        return {trace.rank: trace.step_records for trace in self.trace.ranks}

    def of_rank(self, rank: int) -> list[Rates]:
        """Return the rates of the steps taken, after which a schedule advances."""
        return [step.learning_rates for step in self.steps[rank] if not step.skipped]

    def scheduled(self, positions: Sequence[int]) -> Iterator[list[Rates]]:
        """Yield the workload's rates at positions."""
        yield rates_at(positions, self.analysis)


Prediction = list[Rates] | Match
Predicted = Iterator[Prediction]
LearningRateHypothesis = Hypothesis[LearningRateCase, Prediction]
ScheduleHypothesis = Hypothesis[ScheduleCase, Prediction]


AnyCase = TypeVar("AnyCase", bound=LearningRateCase)


def rates_at(positions: Sequence[int], analysis: TraceAnalysis) -> list[Rates]:
    """Return the workload's rates at positions of its schedule, counted in scheduler steps."""
    optimizer = analysis.oracle.optimizer()
    schedule = analysis.oracle.schedule(optimizer)
    analysis.oracle.set_gradients({})
    rates = []
    for _ in range(max(positions, default=0) + 1):
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        optimizer.step()  # without gradients it changes nothing; a schedule requires it
        schedule()
    return [rates[position] for position in positions]


def without_schedule(count: int, analysis: TraceAnalysis) -> list[Rates]:
    """Return the optimizer's initial rates, ``count`` times."""
    return [tuple(float(group["lr"]) for group in analysis.oracle.optimizer().param_groups)] * count


def same_rates(left: Sequence[Rates], right: Sequence[Rates]) -> bool:
    return len(left) == len(right) and all(
        len(a) == len(b) and all(abs(x - y) <= PRECISION * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def at_positions(positions_of: Callable[[AnyCase], Iterable[list[int]]]) -> Callable[[AnyCase], Predicted]:
    """Return the prediction of the rates at other positions of the schedule."""

    def predict(case: AnyCase) -> Predicted:
        for positions in positions_of(case):
            yield from case.scheduled(positions)

    return predict


def _when_skipped(case: ScheduleCase) -> Iterator[list[int]]:
    if case.attempts != list(range(len(case.used))):
        yield case.attempts


def _every_micro_batch(case: LearningRateCase) -> Iterator[list[int]]:
    """The schedule advanced once per batch before the step, or also for the step's own batches but the last."""
    passes = [step.passes for step in case.steps[case.rank]]
    before = [sum(passes[:attempt]) for attempt in case.attempts]
    yield before
    if before:
        yield [after - 1 for after in (*before[1:], before[-1] + passes[case.attempts[-1]])]
    else:
        yield []


def _steps_lost(case: ScheduleCase) -> Predicted:
    """Match if the rates are those of later steps, in order: the schedule advanced for steps that are missing."""
    due = rates_at(range(len(case.used) + case.analysis.steps_due), case.analysis)
    place = -1
    for used in case.used:
        later = (at for at in range(place + 1, len(due)) if same_rates([used], [due[at]]))
        if (found := next(later, None)) is None:
            return
        place = found
    lost = place + 1 - len(case.used)
    if lost > 0:
        yield Match(figures={"lost": counted(lost, "step")})


def _scaled(case: ScheduleCase) -> Predicted:
    due = rates_at(range(len(case.used)), case.analysis)
    pairs = zip(case.used, due, strict=True)
    factors = [used / right for mine, all_due in pairs for used, right in zip(mine, all_due, strict=False) if right]
    if not any(factors) or any(abs(a - b) > PRECISION * abs(a) for a, b in pairwise(factors)):
        return
    world = case.analysis.world
    known = {world: "the world size", 1 / world: "one over the world size"}
    what = next((name for value, name in known.items() if abs(value - factors[0]) <= PRECISION * value), "a constant")
    yield Match(figures={"factor": f"{factors[0]:.4g}", "what": what})


RATES_DIFFER = LearningRateHypothesis("rates-differ", "optimizer", holds(lambda case: case.ranks_differ),
    "ranks use different learning rates",
    "check whether the schedule depends on something that differs between ranks, such as a validation loss",
    120)  # fmt: skip

EVERY_MICRO_BATCH = LearningRateHypothesis("schedule-stepped-every-micro-batch", "optimizer",
    at_positions(_every_micro_batch),
    "the schedule advanced with every micro-batch",
    "call scheduler.step() only after the optimizer's step",
    150)  # fmt: skip

register(LearningRateCase, EVERY_MICRO_BATCH, RATES_DIFFER)

register(
    ScheduleCase,
    ScheduleHypothesis("schedule-steps-when-skipped", "amp", at_positions(_when_skipped),
        "the schedule advanced at a step that the GradScaler skipped",
        "call scheduler.step() only after steps that were taken", 190),
    ScheduleHypothesis("schedule-never-stepped", "optimizer", at_positions(lambda case: [[0] * len(case.used)]),
        "every step uses the schedule's first rate",
        "call scheduler.step() after each optimizer step", 180),
    ScheduleHypothesis("schedule-stepped-every-epoch", "optimizer",
        at_positions(lambda case: [[attempt // case.analysis.epochs.windows for attempt in case.attempts]]),
        "the schedule advanced once per epoch",
        "call scheduler.step() after each optimizer step", 170),
    ScheduleHypothesis("schedule-stepped-first", "optimizer",
        at_positions(lambda case: [[step + 1 for step in range(len(case.used))]]),
        "the schedule is one step ahead",
        "call scheduler.step() after the optimizer's step", 160),
    ScheduleHypothesis("schedule-stepped-once-a-rank", "optimizer",
        at_positions(lambda case: [[step * case.analysis.world for step in range(len(case.used))]]),
        "the schedule advanced once per rank in every step",
        "count one rank's optimizer steps, not those of all ranks", 140),
    ScheduleHypothesis("schedule-stepped-twice", "optimizer",
        at_positions(lambda case: [[step * 2 for step in range(len(case.used))]]),
        "the schedule advanced twice in every step",
        "call scheduler.step() once per step", 130),
    ScheduleHypothesis("no-schedule", "optimizer",
        lambda case: [without_schedule(len(case.used), case.analysis)],
        "every step uses the rate with which the optimizer was created",
        "create the scheduler with job.scheduler(optimizer)", 110),
    ScheduleHypothesis("rate-zero", "optimizer", holds(lambda case: not any(map(any, case.used))),
        "the learning rate is 0 at every step, so no weight moves",
        "check the optimizer's learning rate, and what the schedule multiplies it by", 107),
    ScheduleHypothesis("schedule-ahead-of-the-steps", "optimizer", _steps_lost,
        "the schedule is {lost} ahead of the optimizer: the rates are those of later steps",
        "check whether optimizer steps are lost, or whether the schedule advances without them", 106),
    ScheduleHypothesis("rate-scaled", "optimizer", _scaled,
        "every step uses {factor} × the workload's rate ({what})",
        "check whether the trainer scales the learning rate", 105),
    ScheduleHypothesis("another-rate", "optimizer", holds(lambda case: True),
        "the rates match no known mistake with the workload's schedule",
        "check which learning rate and which schedule the trainer uses", 104),
)  # fmt: skip
