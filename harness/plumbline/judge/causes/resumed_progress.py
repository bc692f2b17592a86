"""Why a resumed training goes on with other samples or another number of steps than were left, or other rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from plumbline.evidence.trace import Trace
from plumbline.judge.causes.learning_rate import LearningRateCase, Prediction, at_positions, without_schedule
from plumbline.judge.causes.resumed_state import InterruptedCase
from plumbline.judge.hypothesis import Hypothesis, Match, holds
from plumbline.judge.interrupted_training import Draws, Interruption


class ProgressCase(InterruptedCase):
    """A resumed training whose steps are not those that were left."""

    @property
    def resumed(self) -> tuple[Draws, ...]:
        """The samples of each resumed step."""
        return self.interruption.draws[2]

    @property
    def whole(self) -> tuple[Draws, ...]:
        """The samples of each step of the uninterrupted training."""
        return self.interruption.draws[0]

    @cached_property
    def begin(self) -> int | None:
        """The first step of the uninterrupted training that has the samples of the first resumed one."""
        return next((step for step, draws in enumerate(self.whole) if self.resumed[:1] == (draws,)), None)

    @property
    def follows(self) -> bool:
        """Whether the resumed steps are those of the uninterrupted training that follow each other from somewhere on.

        Where batches are few and small, an order that was drawn anew may have one of its steps too.
        """
        begin = len(self.whole) if self.begin is None else self.begin
        return self.resumed == self.whole[begin : begin + len(self.resumed)]

    @property
    def due(self) -> tuple[Draws, ...]:
        """The samples of each step that was left."""
        return self.whole[self.interruption.place :]

    @property
    def resumes_in_place(self) -> bool:
        """Whether the first resumed step is the right one."""
        return self.begin == self.interruption.place


@dataclass(frozen=True, eq=False)
class ResumedRatesCase(LearningRateCase):
    """A resumed training with other learning rates than the uninterrupted one, which is ``analysis``."""

    interruption: Interruption

    @property
    def trace(self) -> Trace:
        """The resumed training."""
        return self.interruption.resumed.trace

    @property
    def taken(self) -> int:
        """How many steps were taken before the interruption."""
        return sum(not step.skipped for step in self.interruption.origin(self.rank).steps)

    @property
    def steps(self) -> range:
        """The numbers of the resumed steps that were taken."""
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
    """Return the prediction that training goes on at one of these steps, which are not the right one."""

    def predict(case: ProgressCase) -> Iterator[Match]:
        if case.begin is not None and not case.resumes_in_place and case.begin in step_of(case):
            yield Match(figures={"begin": case.begin, "place": case.interruption.place})

    return predict


def _at_the_start(case: ProgressCase) -> set[int]:
    return {0} if len(case.resumed) >= case.interruption.total else set()


def _position_of_each_rank(case: ProgressCase) -> set[int]:
    """The place in the epoch where the samples of one rank are counted, and another number of ranks skips as many."""
    one = case.interruption
    then, now = one.saved.world, one.whole.world
    return {one.epoch_begin + (one.place - one.epoch_begin) * now // then} if then != now else set()


def _position_in_other_units(case: ProgressCase) -> set[int]:
    """The place in the epoch where steps are taken for batches, or batches for steps."""
    one, window = case.interruption, case.interruption.workload.accumulate
    position = one.place - one.epoch_begin
    return {one.epoch_begin + position // window, one.epoch_begin + position * window} if window > 1 else set()


def _elsewhere(case: ProgressCase) -> Iterator[Match]:
    if case.follows and not case.resumes_in_place:
        yield Match(figures={"begin": case.begin, "place": case.interruption.place})


def _between_steps(case: ProgressCase) -> Iterator[Match]:
    """The first resumed step has part of one step's samples, and part of the next one's, and so have those after it.

    Of an order that was drawn anew, one step alone may have them by chance, and where two steps are most of an epoch,
    any.
    """
    most = sum(map(len, case.whole[: case.interruption.epoch_length])) / 2
    pairs = [(set(left), set(right)) for left, right in pairwise(case.whole) if len(left) + len(right) <= most]

    def between(draws: Draws) -> bool:
        used = set(draws)
        return any(used <= left | right and used & left and used & right for left, right in pairs)

    first, *others = case.resumed
    if others and case.begin is None and between(first) and all(one in case.whole or between(one) for one in others):
        yield Match()


PROGRESS = (
    ProgressHypothesis("progress-on-some-ranks", "checkpoint", _ranks_differ,
        "ranks took {counts} steps after resuming, by rank",
        "do all ranks load how far training had come?", 199),
    ProgressHypothesis("nothing-resumed", "checkpoint", holds(lambda case: not case.resumed),
        "no step was made after resuming",
        "does the trainer take an interrupted training for a finished one?", 195),
    ProgressHypothesis("too-many-steps-left", "checkpoint", _too_many_left,
        "{count} steps were made after resuming, and {due} were left",
        "are epochs, or steps, counted from zero after resuming?", 190),
    ProgressHypothesis("too-few-steps-left", "checkpoint", _too_few_left,
        "{count} steps were made after resuming, and {due} were left",
        "are epochs, or steps, of before the interruption counted twice?", 185),
    ProgressHypothesis("order-lost-later", "checkpoint", _order_lost_later,
        "the first resumed step has the right samples, and resumed step {later} others",
        "are batches skipped once more, in the next epoch?", 180),
    ProgressHypothesis("trained-all-over-again", "checkpoint", _begins_at(_at_the_start),
        "all epochs are trained again",
        "are the epoch and the place in it saved, and loaded?", 175),
    ProgressHypothesis("position-not-restored", "checkpoint",
        _begins_at(lambda case: {case.interruption.epoch_begin}),
        "the epoch begins again",
        "skip the batches that were used before the interruption", 170),
    ProgressHypothesis("epoch-not-restored", "checkpoint",
        _begins_at(lambda case: {0, case.interruption.place - case.interruption.epoch_begin}),
        "the samples are those of the first epoch, in its order",
        "is the epoch restored, and set_epoch called with it?", 165),
    ProgressHypothesis("position-of-each-rank", "checkpoint", _begins_at(_position_of_each_rank),
        "each rank skips as many batches as a rank had before, although there are more or fewer ranks now",
        "count samples over all ranks", 160),
    ProgressHypothesis("position-in-other-units", "checkpoint", _begins_at(_position_in_other_units),
        "training goes on at step {begin}, not {place}, as if steps were batches or batches steps",
        "in which unit is the position saved and loaded?", 155),
    ProgressHypothesis("batch-again-after-resuming", "checkpoint",
        _begins_at(lambda case: {case.interruption.place - 1}),
        "the last step's samples are used again",
        "is the step counted before the checkpoint is saved?", 150),
    ProgressHypothesis("batch-left-out-after-resuming", "checkpoint",
        _begins_at(lambda case: {case.interruption.place + 1}),
        "one step's samples are left out",
        "is a step counted twice?", 145),
    ProgressHypothesis("resumed-elsewhere", "checkpoint",
        _elsewhere,
        "training goes on at step {begin}, not {place}",
        "in which unit, and from where, is the position counted?", 140),
    ProgressHypothesis("position-in-other-units", "checkpoint", _between_steps,
        "training goes on between two steps",
        "in which unit is the position saved and loaded?", 135),
    ProgressHypothesis("order-drawn-anew", "checkpoint", holds(lambda case: not case.follows),
        "the order is no epoch's of the uninterrupted training",
        "which seed, and which epoch, does the sampler use?", 130),
)  # fmt: skip


def _from_the_start(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield list(case.steps)
    yield [case.taken, *case.steps[1:]]  # the optimizer has kept its rate until the schedule sets it


def _first_rate(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [0, *(case.taken + step for step in case.steps[1:])]


def _a_step_ahead(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [case.taken + step + 1 for step in case.steps]


def _a_step_behind(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [case.taken + step - 1 for step in case.steps]
    yield [case.taken, *(case.taken + step - 1 for step in case.steps[1:])]


def _skipped_counted(case: ResumedRatesCase) -> Iterator[list[int]]:
    attempts = case.interruption.place
    if attempts != case.taken:
        yield [attempts + step for step in case.steps]
        yield [case.taken, *(attempts + step for step in case.steps[1:])]


def _standing_still(case: ResumedRatesCase) -> Iterator[list[int]]:
    yield [case.taken] * len(case.steps)
    yield [0] * len(case.steps)


RATES = (
    RatesHypothesis("scheduler-not-restored", "checkpoint", at_positions(_from_the_start),
        "the schedule begins again",
        "is the scheduler's state_dict saved and loaded?", 190),
    RatesHypothesis("rate-not-restored", "checkpoint", at_positions(_first_rate),
        "the first resumed step has the schedule's first rate, which the optimizer holds",
        "is the optimizer's state_dict loaded?", 180),
    RatesHypothesis("scheduler-stepped-once-too-often", "checkpoint", at_positions(_a_step_ahead),
        "the schedule is a step ahead",
        "is it stepped once more when it is created, or loaded?", 170),
    RatesHypothesis("scheduler-a-step-behind", "checkpoint", at_positions(_a_step_behind),
        "the schedule is a step behind",
        "save it after it was stepped", 160),
    RatesHypothesis("scheduler-counts-skipped-steps", "checkpoint", at_positions(_skipped_counted),
        "steps that the GradScaler skipped count as taken",
        "load the scheduler's own state instead of counting steps", 150),
    RatesHypothesis("scheduler-stands-still", "checkpoint", at_positions(_standing_still),
        "the schedule does not move on",
        "does it belong to the optimizer that is used after resuming?", 140),
    RatesHypothesis("schedule-gone", "checkpoint",
        lambda case: [without_schedule(len(case.used), case.analysis)],
        "every step has the rate with which the optimizer was created",
        "is a scheduler created when training is resumed?", 130),
    RatesHypothesis("rates-not-restored", "checkpoint", holds(lambda case: True),
        "the rates are those of no known mistake with the schedule",
        "are the scheduler and the optimizer loaded, and in which order?", 120),
)  # fmt: skip
