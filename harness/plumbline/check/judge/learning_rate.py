"""Checks that all ranks of a script step with the same learning rates and settings, and notes what is unusual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, failed_observers, headline_note, information, noted, side_by_side
from plumbline.check.judge.rank_weights import ranks_begin_apart
from plumbline.core.finding import Finding
from plumbline.evidence.training_record import StepRecord, step_copies
from plumbline.judge.causes.learning_rate import PRECISION, LearningRateCase
from plumbline.judge.checks.learning_rate import CHECK, moved_with_every_pass, wrong_rates
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import listed

OBSERVER = "learning-rate"


def judge_learning_rate(training: RecordedTraining) -> Iterator[Finding]:
    """Yield rates that differ between ranks, schedules that advance with micro-batches, and what else is notable."""
    different, are_compared = None, False
    if not ranks_begin_apart(training):
        case_of = partial(LearningRateCase, training)
        different = wrong_rates(training, _rates_of_the_first_rank, "the first rank's", case_of, PRECISION)
        # A difference of rates in multiples of float64 rounding would not be meaningful to users.
        different = different and replace(different, error_x_noise=None, limit_x_noise=None)
        are_compared = all(
            len(_rates_of_the_first_rank(ranks)) == training.world_size - 1 for ranks in training.steps_side_by_side
        )
        different = different or _other_settings(training)
    with_passes = moved_with_every_pass(training)
    if with_passes is not None and not _counts_optimizer_steps(training):
        yield headline_note(
            CHECK,
            "The scheduler steps with every micro-batch, so most of its rates are never used. That is right only if it "
            "is made for micro-batches. If it is made for optimizer steps, call scheduler.step() only after "
            "optimizer.step().",
        )
        with_passes = None
    found = [finding for finding in (different, with_passes) if finding is not None]
    yield from found
    yield from failed_observers(training, OBSERVER, CHECK)
    steps = list(noted(training, OBSERVER))
    rates = listed(dict.fromkeys(f"{rate:.6g}" for one in steps for rate in one.facts["rates"]))
    if rates and not found:
        where = "; all ranks use the same" if are_compared and training.world_size > 1 else ""
        are = "rates are" if "," in rates else "rate is"
        yield passed(CHECK, f"in the recorded steps the learning {are} {rates}{where}")
    if not found:
        yield from _after_the_first_window(training)
        yield from _notable(training)


def _counts_optimizer_steps(training: RecordedTraining) -> bool:
    """Return whether the longest schedule has as many steps as epochs have optimizer steps, but not batches.

    The number of batches is that of the longest loader. A schedule without an end may be made for either.
    """
    noted_steps = [one for one in noted(training, OBSERVER) if one.step.passes]
    length = max((length for one in noted_steps for length in one.facts.get("lengths", ())), default=0)
    window = max((len(one.step.passes) for one in noted_steps), default=0)
    loaders = [one for rank in training.ranks for one in rank.noted("loaders").get("loaders", ())]
    batches = max((one["length"] for one in loaders if one.get("length")), default=0)
    steps = {batches // window, math.ceil(batches / window)} if window else set()
    return length % max(batches, 1) > 0 and any(steps_each > 1 and length % steps_each == 0 for steps_each in steps)


def _rates_of_the_first_rank(ranks: Mapping[int, StepRecord]) -> Mapping[int, Sequence[float]]:
    first, *others = ranks.values()
    rates = first.learning_rates
    alike = (one for one in others if step_copies((first, one)) and len(one.learning_rates) == len(rates))
    return {one.rank: rates for one in alike if all(map(math.isfinite, (*rates, *one.learning_rates)))}


def _other_settings(training: RecordedTraining) -> Finding | None:
    """Return the failure where copies or shards of one parameter are updated with different settings."""
    for ranks in side_by_side(training, OBSERVER):
        first, *others = ranks.values()
        for other in (one for one in others if step_copies((first, one))):
            groups = zip(first.facts.get("settings", ()), other.facts.get("settings", ()), strict=False)
            pairs = ((name, a[name], b[name]) for a, b in groups for name in sorted(a.keys() & b.keys()))
            if found := next((each for each in pairs if not _are_same(*each[1:])), None):
                name, ours, theirs = found
                return _differs(name, (first, ours), (other, theirs))
    return None


def _are_same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    close = (math.isclose(a, b, rel_tol=PRECISION) for a, b in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(close)


def _differs(
    name: str, ours: tuple[ObserverFacts, Sequence[float]], theirs: tuple[ObserverFacts, Sequence[float]]
) -> Finding:
    (first, own), (other, value) = ours, theirs
    return failed_with_hint(
        CHECK,
        f"the optimizer's setting {name} is {_in_words(own)} on rank {first.rank} and {_in_words(value)} on rank "
        f"{other.rank}, although both ranks update copies or shards of the same parameters",
        "give the optimizer the same settings on all ranks",
        cause="settings-differ-between-ranks",
        family="optimizer",
        step=first.step.number,
        rank=other.rank,
    )


def _in_words(numbers: Sequence[float]) -> str:
    told = [f"{one:.13g}" for one in numbers]
    return told[0] if len(told) == 1 else f"({', '.join(told)})"


def _notable(training: RecordedTraining) -> Iterator[Finding]:
    steps = [one for one in noted(training, OBSERVER) if one.facts["schedulers"]]
    if not steps:
        return
    taken = [one for one in steps if one.step.number > steps[0].step.number]
    moved = [one for one in steps if one.facts["schedule"]]
    if taken and not moved:
        yield information(CHECK, "there is a scheduler, but it did not step in the recorded steps")
    if moved and all(_before_the_step(one) for one in steps):
        yield information(
            CHECK,
            "the scheduler steps before the optimizer, so the first rate of the schedule is not used: call "
            "scheduler.step() after optimizer.step()",
        )
    several = next((one for one in moved if len(one.facts["schedule"]) > one.facts["schedulers"]), None)
    if several is not None:
        count = len(several.facts["schedule"])
        yield information(CHECK, f"the scheduler stepped {count} times before {several.name} on rank {several.rank}")
    skipped = next((b for a, b in pairwise(steps) if _after_skipped(a, b)), None)
    if skipped is not None:
        yield information(
            CHECK,
            f"the scheduler stepped although the GradScaler skipped the step before {skipped.name} on rank "
            f"{skipped.rank}",
        )


def _after_the_first_window(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what a later window of steps shows of schedules that took another course in the first one."""
    for one in noted(training, OBSERVER):
        if (rates := one.facts.get("left")) is not None:
            yield headline_note(
                CHECK,
                f"At {one.name}, the learning rate is {_in_words(one.facts['rates'])}, but a scheduler's is "
                f"{_in_words(rates)}. In the first recorded steps, the optimizer had that of a scheduler. Unless "
                "this is intended, leave the rate to the scheduler.",
            )
            return
        usual, count = one.facts.get("usual"), len(one.facts["schedule"])
        if usual and count != usual:
            yield headline_note(
                CHECK,
                f"The scheduler stepped {_times(count)} before {one.name}, but {_times(usual)} before each of the "
                "first recorded steps. Unless this is intended, call scheduler.step() equally often.",
            )
            return


def _times(count: int) -> str:
    return "not at all" if not count else "once" if count == 1 else f"{count} times"


def _before_the_step(one: ObserverFacts) -> bool:
    last = max((each.number for each in one.step.passes), default=None)
    return any(number == last and before_step for number, before_step in one.facts["schedule"])


def _after_skipped(one: ObserverFacts, following: ObserverFacts) -> bool:
    same = (one.rank, one.step.optimizer) == (following.rank, following.step.optimizer)
    return same and one.step.skipped and bool(following.facts["schedule"])
