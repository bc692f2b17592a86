"""Why a resumed training continues with other samples, steps or learning rates than the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from plumbline.evidence.trace import Trace
from plumbline.judge.causes.learning_rate import Prediction, ScheduleCase, at_positions, without_schedule
from plumbline.judge.causes.resumed_state import InterruptedCase
from plumbline.judge.hypothesis import Hypothesis, Match, holds, register
from plumbline.judge.interrupted_training import Draws, Interruption


class ProgressCase(InterruptedCase):
    """A resumed training whose steps are not the remaining ones."""

    @property
    def resumed(self) -> tuple[Draws, ...]:
        return self.interruption.draws[2]

    @property
    def whole(self) -> tuple[Draws, ...]:
        return self.interruption.draws[0]

    @cached_property
    def begin(self) -> int | None:
        """The first step of the uninterrupted training that has the samples of the first resumed step."""
        return next((step for step, draws in enumerate(self.whole) if self.resumed[:1] == (draws,)), None)

    @property
    def follows(self) -> bool:
        """Whether the resumed steps are consecutive steps of the uninterrupted training.

        With few and small batches, a new order can also contain one of these steps by chance.
        """
        begin = len(self.whole) if self.begin is None else self.begin
        return self.resumed == self.whole[begin : begin + len(self.resumed)]

    @property
    def due(self) -> tuple[Draws, ...]:
        return self.whole[self.interruption.steps_done :]

    @property
    def resumes_in_place(self) -> bool:
        return self.begin == self.interruption.steps_done


@dataclass(frozen=True, eq=False)
class ResumedRatesCase(ScheduleCase):
    """A resumed training with other learning rates than the uninterrupted one, which is ``analysis``."""

    interruption: Interruption

    @property
    def trace(self) -> Trace:
        return self.interruption.resumed.trace

    @property
    def taken(self) -> int:
        return sum(not step.skipped for step in self.interruption.origin(self.rank).steps)

    @property
    def step_numbers(self) -> range:
        return range(len(self.used))


ProgressHypothesis = Hypothesis[ProgressCase, Match]
RatesHypothesis = Hypothesis[ResumedRatesCase, Prediction]


def _ranks_differ(case: ProgressCase) -> Iterator[Match]:
    counts = [len(trace.steps) for trace in case.interruption.resumed.trace.ranks]
    if len(set(counts)) > 1:
        yield Match(figures={"counts": ", ".join(map(str, counts))})


def _too_many_left(case: ProgressCase) -> Iterator[Match]:
    if case.resumes_in_place and case.resumed[: len(case.due)] == case.due:
        yield Match(figures={"count": len(case.resumed), "due": len(case.due)})


def _too_few_left(case: ProgressCase) -> Iterator[Match]:
    if case.resumes_in_place and case.due[: len(case.resumed)] == case.resumed:
        yield Match(figures={"count": len(case.resumed), "due": len(case.due)})


def _order_lost_later(case: ProgressCase) -> Iterator[Match]:
    if case.resumes_in_place:
        pairs = enumerate(zip(case.resumed, case.due, strict=False))
        yield Match(figures={"later": next((step for step, (used, right) in pairs if used != right), 0)})


def _begins_at(step_of: Callable[[ProgressCase], set[int]]) -> Callable[[ProgressCase], Iterator[Match]]:
    def predict(case: ProgressCase) -> Iterator[Match]:
        if case.begin is not None and not case.resumes_in_place and case.begin in step_of(case):
            yield Match(figures={"begin": case.begin, "steps_done": case.interruption.steps_done})

    return predict


def _position_of_each_rank(case: ProgressCase) -> set[int]:
    """The resumed step if one rank's batches were counted, and a different number of ranks skips as many."""
    one = case.interruption
    then, now = one.saved.world, one.whole.world
    return {one.epoch_begin + (one.steps_done - one.epoch_begin) * now // then} if then != now else set()


def _position_in_other_units(case: ProgressCase) -> set[int]:
    """The resumed step if steps are mistaken for batches, or batches for steps."""
    one, window = case.interruption, case.interruption.workload.accumulate
    position = one.steps_done - one.epoch_begin
    return {one.epoch_begin + position // window, one.epoch_begin + position * window} if window > 1 else set()


def _elsewhere(case: ProgressCase) -> Iterator[Match]:
    if case.follows and not case.resumes_in_place:
        yield Match(figures={"begin": case.begin, "steps_done": case.interruption.steps_done})


def _between_steps(case: ProgressCase) -> Iterator[Match]:
    """Match if the first resumed steps mix the samples of two consecutive steps.

    In a new order, a single step can do so by chance, and any step can if two steps make up most of an epoch.
    """
    most = sum(map(len, case.whole[: case.interruption.epoch_length])) / 2
    pairs = [(set(left), set(right)) for left, right in pairwise(case.whole) if len(left) + len(right) <= most]

    def between(draws: Draws) -> bool:
        used = set(draws)
        return any(used <= left | right and used & left and used & right for left, right in pairs)

    first, *others = case.resumed
    if others and case.begin is None and between(first) and all(one in case.whole or between(one) for one in others):
        yield Match()


register(
    ProgressCase,
    ProgressHypothesis("progress-on-some-ranks", "checkpoint", _ranks_differ,
        "the ranks took {counts} steps after resuming",
        "load the training's progress on every rank", 199),
    ProgressHypothesis("nothing-resumed", "checkpoint", holds(lambda case: not case.resumed),
        "no step was taken after resuming",
        "check whether the trainer treats the interrupted training as finished", 195),
    ProgressHypothesis("too-many-steps-left", "checkpoint", _too_many_left,
        "{count} steps were taken after resuming, but {due} remained",
        "continue to count epochs and steps instead of starting from zero", 190),
    ProgressHypothesis("too-few-steps-left", "checkpoint", _too_few_left,
        "{count} steps were taken after resuming, but {due} remained",
        "check whether epochs or steps before the interruption are counted twice", 185),
    ProgressHypothesis("order-lost-later", "checkpoint", _order_lost_later,
        "the first resumed step has the right samples, but resumed step {later} has others",
        "check whether batches are skipped again in the next epoch", 180),
    ProgressHypothesis("trained-all-over-again", "checkpoint",
        _begins_at(lambda case: {0} if len(case.resumed) >= case.interruption.total else set()),
        "all epochs are trained again",
        "save and load the epoch and the position in it", 175),
    ProgressHypothesis("position-not-restored", "checkpoint",
        _begins_at(lambda case: {case.interruption.epoch_begin}),
        "the epoch starts again",
        "skip the batches that were used before the interruption", 170),
    ProgressHypothesis("epoch-not-restored", "checkpoint",
        _begins_at(lambda case: {0, case.interruption.steps_done - case.interruption.epoch_begin}),
        "the samples are those of the first epoch, in its order",
        "restore the epoch, and call set_epoch with it", 165),
    ProgressHypothesis("position-of-each-rank", "checkpoint", _begins_at(_position_of_each_rank),
        "each rank skips as many batches as a rank had used before, but the number of ranks has changed",
        "count samples over all ranks", 160),
    ProgressHypothesis("position-in-other-units", "checkpoint", _begins_at(_position_in_other_units),
        "training continues at step {begin} instead of {steps_done}, as if steps were batches or batches were steps",
        "save and load the position in the same unit", 155),
    ProgressHypothesis("batch-again-after-resuming", "checkpoint",
        _begins_at(lambda case: {case.interruption.steps_done - 1}),
        "the last step's samples are used again",
        "count the step before the checkpoint is saved", 150),
    ProgressHypothesis("batch-left-out-after-resuming", "checkpoint",
        _begins_at(lambda case: {case.interruption.steps_done + 1}),
        "one step's samples are left out",
        "check whether a step is counted twice", 145),
    ProgressHypothesis("resumed-elsewhere", "checkpoint",
        _elsewhere,
        "training continues at step {begin} instead of {steps_done}",
        "check in which unit, and from where, the position is counted", 140),
    ProgressHypothesis("position-in-other-units", "checkpoint", _between_steps,
        "training continues between two steps",
        "save and load the position in the same unit", 135),
    ProgressHypothesis("order-drawn-anew", "checkpoint", holds(lambda case: not case.follows),
        "the order matches no epoch of the uninterrupted training",
        "check which seed and which epoch the sampler uses", 130),
)  # fmt: skip


def _from_the_start(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield list(case.step_numbers)
    yield [case.taken, *case.step_numbers[1:]]  # the optimizer keeps its rate until the schedule sets it


def _a_step_behind(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [case.taken + step - 1 for step in case.step_numbers]
    yield [case.taken, *(case.taken + step - 1 for step in case.step_numbers[1:])]


def _skipped_counted(case: ResumedRatesCase) -> Iterator[list[int]]:
    attempts = case.interruption.steps_done
    if attempts != case.taken:
        yield [attempts + step for step in case.step_numbers]
        yield [case.taken, *(attempts + step for step in case.step_numbers[1:])]


def _standing_still(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [case.taken] * len(case.step_numbers)
    yield [0] * len(case.step_numbers)


register(
    ResumedRatesCase,
    RatesHypothesis("scheduler-not-restored", "checkpoint", at_positions(_from_the_start),
        "the schedule starts again",
        "save and load the scheduler's state_dict", 190),
    RatesHypothesis("rate-not-restored", "checkpoint",
        at_positions(lambda case: [[0, *(case.taken + step for step in case.step_numbers[1:])]]),
        "the first resumed step uses the schedule's first rate",
        "load the optimizer's state_dict", 180),
    RatesHypothesis("scheduler-stepped-once-too-often", "checkpoint",
        at_positions(lambda case: [[case.taken + step + 1 for step in case.step_numbers]]),
        "the schedule is one step ahead",
        "check whether the scheduler steps once more when it is created or loaded", 170),
    RatesHypothesis("scheduler-a-step-behind", "checkpoint", at_positions(_a_step_behind),
        "the schedule is one step behind",
        "save the scheduler after its step", 160),
    RatesHypothesis("scheduler-counts-skipped-steps", "checkpoint", at_positions(_skipped_counted),
        "steps that the GradScaler skipped count as taken",
        "load the scheduler's own state instead of counting steps", 150),
    RatesHypothesis("scheduler-stands-still", "checkpoint", at_positions(_standing_still),
        "the schedule does not advance",
        "create the scheduler for the optimizer that is used after resuming", 140),
    RatesHypothesis("schedule-gone", "checkpoint",
        lambda case: [without_schedule(len(case.used), case.analysis)],
        "every step uses the rate with which the optimizer was created",
        "create a scheduler when training resumes", 130),
    RatesHypothesis("rates-not-restored", "checkpoint", holds(lambda case: True),
        "the rates match no known mistake with the schedule",
        "check that the scheduler and the optimizer are loaded, and in which order", 120),
)  # fmt: skip
