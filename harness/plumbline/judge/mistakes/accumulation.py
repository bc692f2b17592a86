"""Micro-batches that were weighted wrongly, lost, or not synchronised."""

from __future__ import annotations

from plumbline.judge.hypothesis import register
from plumbline.judge.truth import (
    Combination,
    GradientCase,
    GradientMistake,
    Predictions,
    SomeParameters,
    Weight,
    even,
    multiplied,
    several,
)


def _part_of_a_window(case: GradientCase) -> list[float]:
    return [case.micro_batches / case.accumulate] if case.micro_batches < case.accumulate else []


def _kept(first: int, end: int, case: GradientCase) -> Predictions:
    for factor in (1.0, case.micro_batches / (end - first)):
        yield Combination(lambda r, b, n, f=factor: f * (first <= b < end))  # type: ignore[misc]


def _only_last(case: GradientCase) -> Predictions:
    if case.micro_batches > 1:
        yield from _kept(case.micro_batches - 1, case.micro_batches, case)
        # Each micro-batch replaces the gradient of the ones before, and none is averaged.
        world, own = case.world, case.rank
        yield Combination(lambda r, b, n: float(world * (r == own and b == n - 1)))


def _some_only_last(case: GradientCase) -> Predictions:
    if case.micro_batches > 1:
        yield SomeParameters(Combination(lambda r, b, n: float(b == n - 1)))


def _some_first_missing(case: GradientCase) -> Predictions:
    for lost in range(1, case.micro_batches - 1):
        yield SomeParameters(Combination(lambda r, b, n, lost=lost: float(b >= lost)))  # type: ignore[misc]


def _first_missing(case: GradientCase) -> Predictions:
    for lost in range(1, case.micro_batches):
        yield from _kept(lost, case.micro_batches, case)


def _last_missing(case: GradientCase) -> Predictions:
    for kept in range(1, case.micro_batches):
        yield from _kept(0, kept, case)


def _last_one_step_late(case: GradientCase) -> Predictions:
    """Predict that a step's first micro-batches are reduced together with the last ones of the previous step."""
    for kept in range(1, case.micro_batches):
        first: Weight = lambda r, b, n, kept=kept: float(b < kept)  # type: ignore[misc]  # noqa: E731
        last: Weight = lambda r, b, n, kept=kept: float(b >= kept)  # type: ignore[misc]  # noqa: E731
        if case.has_earlier_step:
            yield Combination(first, earlier=last)
        elif case.index == 0:
            yield Combination(first)


def _middle_missing(case: GradientCase) -> Predictions:
    count = case.micro_batches
    for lost in range(1, count - 1):
        for factor in (1.0, count / (count - 1)):
            yield Combination(lambda r, b, n, f=factor, lost=lost: f * (b != lost))  # type: ignore[misc]


def _not_zeroed(case: GradientCase) -> Predictions:
    if case.has_earlier_step:
        yield Combination(even(1.0), left_over=1.0)
        if case.scale:  # the left-over gradient was unscaled before, and is unscaled again
            yield Combination(even(1.0), left_over=1 / case.scale)


def _partly_left_in(case: GradientCase) -> Predictions:
    """Predict that some ranks begin with the previous gradient, which is averaged, or divided by the window, again."""
    counts, window = range(1, case.world + 1), case.micro_batches or 1  # a rank may run no backward pass
    factors = {count / part for count in counts for part in (1, case.world, window)}
    factors |= {count / case.world / window for count in counts}
    for factor in sorted(factors - {1.0}) if case.has_earlier_step else ():
        yield Combination(even(1.0), left_over=factor)


def _partly_synchronised(case: GradientCase) -> Predictions:
    if case.world > 1 and case.micro_batches > 1 and case.has_shares[case.rank]:
        for index in range(case.micro_batches):
            yield Combination(_alone(case, index, only=True))
            yield Combination(_alone(case, index, only=False))


def _alone(case: GradientCase, place: int, *, only: bool) -> Weight:
    world, own = case.world, case.rank
    return lambda r, b, n: float(world * (r == own)) if (b == place) == only else 1.0


def _reduced_again(case: GradientCase) -> Predictions:
    """Predict that the sum so far was summed over ranks, or divided by their number, after every micro-batch."""
    if case.world > 1 and case.micro_batches > 1:
        for base in (case.world, 1 / case.world):
            for least in (0, 1, -1):
                yield Combination(lambda r, b, n, base=base, least=least: base ** (n - 1 - b + least))  # type: ignore[misc]


PREVIOUS_STEP_NOT_ZEROED = GradientMistake(
    "previous-step-not-zeroed", "accumulation", _not_zeroed,
    "this step's plus those of the previous step",
    "call zero_grad() before the first backward pass of each step", 605,
)  # fmt: skip

register(
    GradientCase,
    GradientMistake("not-divided-by-micro-batches", "accumulation",
        multiplied(lambda case: several(case.micro_batches)),
        "the sum over {micro_batches} micro-batches, not their mean",
        "divide the loss, or the gradients, by the number of micro-batches", 675),
    GradientMistake("short-window-divided-by-full-length", "accumulation",
        multiplied(_part_of_a_window),
        "divided by the {accumulate} micro-batches of a full window, although this one has only {micro_batches}",
        "divide the last window of an epoch by its own length", 670),
    GradientMistake("only-last-micro-batch", "accumulation", _only_last,
        "those of the last of {micro_batches} micro-batches",
        "zero and synchronise gradients once a step, not once a micro-batch", 665),
    GradientMistake("first-micro-batches-missing", "accumulation", _first_missing,
        "without the first of {micro_batches} micro-batches",
        "check for a zero_grad() or an evaluation that clears gradients within the window", 660),
    GradientMistake("last-micro-batches-missing", "accumulation", _last_missing,
        "without the last of {micro_batches} micro-batches",
        "reduce, clip and step after the last backward pass of the window", 655),
    GradientMistake("micro-batch-missing", "accumulation", _middle_missing,
        "without one of {micro_batches} micro-batches",
        "check what loses or overwrites the gradient of a micro-batch", 650),
    GradientMistake("divided-twice", "accumulation",
        multiplied(lambda case: [1 / n for n in several(case.micro_batches)]),
        "divided by the number of micro-batches twice",
        "divide once: in the loss, or after the backward pass", 645),
    GradientMistake("divided-twice", "accumulation", multiplied(lambda case: [1 / n for n in several(case.accumulate)]),
        "divided by the number of micro-batches, and again by that of a full window",
        "divide once: in the loss, or after the backward pass", 640),
    GradientMistake("last-micro-batches-one-step-late", "accumulation", _last_one_step_late,
        "those of the first of {micro_batches} micro-batches, and of the last ones of the previous step",
        "synchronise gradients at the last micro-batch of each step", 608),
    PREVIOUS_STEP_NOT_ZEROED,
    GradientMistake("micro-batch-missing", "accumulation", _some_only_last,
        "those of the last of {micro_batches} micro-batches for some parameters",
        "do not zero the gradients of these parameters for every micro-batch", 335),
    GradientMistake("first-micro-batches-missing", "accumulation", _some_first_missing,
        "right for some parameters, and without the first of {micro_batches} micro-batches for others",
        "check what clears the gradients of these parameters within the window", 333),
    GradientMistake("some-micro-batches-not-synchronised", "accumulation", _partly_synchronised,
        "averaged over ranks for some of {micro_batches} micro-batches and rank {rank}'s own for others",
        "run all micro-batches but the last inside no_sync(), and the last one outside", 320),
    GradientMistake("previous-step-partly-left-in", "accumulation", _partly_left_in,
        "this step's plus a part, or a multiple, of those of the previous step",
        "call zero_grad() before the first backward pass of each step, on every rank", 318),
    GradientMistake("reduced-with-every-micro-batch", "accumulation", _reduced_again,
        "reduced over ranks again with every micro-batch",
        "reduce once a step, after the last backward pass: earlier reductions are reduced again", 315),
)  # fmt: skip
