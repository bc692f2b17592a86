"""Do all ranks step with the same learning rates, and does the schedule move on once a step?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import (
    ObserverFacts,
    failed_observers,
    information,
    listed,
    noted,
    same_parameters,
    side_by_side,
)
from plumbline.check.judge.recorded_weights import ranks_begin_apart
from plumbline.core.finding import Finding
from plumbline.judge.causes.learning_rate import PRECISION
from plumbline.judge.findings import passed

OBSERVER = "learning-rate"


def judge_learning_rate(training: RecordedTraining) -> Iterator[Finding]:
    """Yield where rates differ between ranks, where schedules move on with micro-batches, and what else is notable."""
    found = [finding for flaw in (_differ, _every_micro_batch) if (finding := flaw(training)) is not None]
    yield from found
    yield from failed_observers(training, OBSERVER, OBSERVER)
    steps = list(noted(training, OBSERVER))
    rates = listed(dict.fromkeys(f"{rate:.6g}" for one in steps for rate in one.facts["rates"]))
    if rates and not found:
        where = ", the same on all ranks" if training.world_size > 1 else ""
        are = "rates are" if "," in rates else "rate is"
        yield passed("learning-rate", f"in the recorded steps the learning {are} {rates}{where}")
    if not found:
        yield from _notable(training)


def _differ(training: RecordedTraining) -> Finding | None:
    if ranks_begin_apart(training):
        return None
    for ranks in side_by_side(training, OBSERVER):
        first, *others = ranks.values()
        for other in others:
            mine, theirs = first.facts["rates"], other.facts["rates"]
            if same_parameters((first, other)) and _are_different(mine, theirs):
                return other.failed(
                    "learning-rate",
                    f"ranks step with different learning rates: {listed(mine)} on rank {first.rank} and "
                    f"{listed(theirs)} on rank {other.rank}",
                    "do not let the schedule depend on values that differ between ranks, such as a validation loss",
                    cause="rates-differ",
                    family="optimizer",
                )
    return None


def _are_different(left: Sequence[float], right: Sequence[float]) -> bool:
    return len(left) == len(right) and any(
        abs(a - b) > PRECISION * max(abs(a), abs(b)) for a, b in zip(left, right, strict=True)
    )


def _every_micro_batch(training: RecordedTraining) -> Finding | None:
    """Find schedules that move on after each backward pass of a window of several.

    Schedules that move on several times in one place, as Accelerate's do, mean to do so.
    """
    for one in noted(training, OBSERVER):
        window = [each.number for each in one.step.passes]
        between = {number for number, before_step in one.facts["schedule"] if before_step} & set(window[:-1])
        if len(window) > 1 and len(between) == len(window) - 1:
            return one.failed(
                "learning-rate",
                f"the scheduler stepped after each of the {len(window)} backward passes of a step",
                "call scheduler.step() only after the optimizer's step",
                cause="schedule-stepped-every-micro-batch",
                family="optimizer",
            )
    return None


def _notable(training: RecordedTraining) -> Iterator[Finding]:
    """Say what is often a mistake, and sometimes meant."""
    steps = [one for one in noted(training, OBSERVER) if one.facts["schedulers"]]
    if not steps:
        return
    taken = [one for one in steps if one.step.number > steps[0].step.number]
    moved = [one for one in steps if one.facts["schedule"]]
    if taken and not moved:
        yield information("learning-rate", "there is a scheduler, but it did not step in the recorded steps")
    if moved and all(_before_the_step(one) for one in steps):
        yield information(
            "learning-rate",
            "the scheduler steps before the optimizer, so the first rate of the schedule is not used",
        )
    several = next((one for one in moved if len(one.facts["schedule"]) > one.facts["schedulers"]), None)
    if several is not None:
        count = len(several.facts["schedule"])
        yield information(
            "learning-rate", f"the scheduler stepped {count} times before {several.name} on rank {several.rank}"
        )
    skipped = next((b for a, b in pairwise(steps) if _after_skipped(a, b)), None)
    if skipped is not None:
        yield information(
            "learning-rate",
            f"the scheduler stepped although the GradScaler skipped the step before {skipped.name} on rank "
            f"{skipped.rank}",
        )


def _before_the_step(one: ObserverFacts) -> bool:
    last = max((each.number for each in one.step.passes), default=None)
    return any(number == last and before_step for number, before_step in one.facts["schedule"])


def _after_skipped(one: ObserverFacts, following: ObserverFacts) -> bool:
    same = (one.rank, one.step.optimizer) == (following.rank, following.step.optimizer)
    return same and one.step.skipped and bool(following.facts["schedule"])
