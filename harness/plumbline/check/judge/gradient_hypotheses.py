"""Known mistakes that show in the gradient that an optimizer receives: each is a combination of local gradients.

Names, families and specificities are those of ``plumbline.judge.causes.gradient_hypotheses``: one mistake has one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from plumbline.check.judge.gradient_case import Combination, ReceivedGradient
from plumbline.judge.causes.hypothesis import Hypothesis

Choices = Sequence[Combination]
"""Combinations of which each parameter fits one; a single one where all parameters are alike."""

GradientMistake = Hypothesis[ReceivedGradient, Choices]


def _weighted(case: ReceivedGradient, weight: Callable[[int, int, int], float]) -> Combination:
    """Return the combination whose coefficients are ``weight(rank, place, number of passes)``."""
    return Combination(
        {
            rank: [weight(rank, b, len(step.passes)) for b in range(len(step.passes))]
            for rank, step in case.ranks.items()
        }
    )


def _own(case: ReceivedGradient, rank: int | None = None) -> Combination:
    own = case.rank if rank is None else rank
    return _weighted(case, lambda r, b, n: float(r == own))


def _not_synchronised(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [_own(case)]


def _anothers(case: ReceivedGradient) -> Iterator[Choices]:
    for rank in case.ranks:
        if rank != case.rank:
            yield [_own(case, rank)]


def _some_ranks(case: ReceivedGradient) -> Iterator[Choices]:
    world = case.world
    for size in range(2, world):
        if world % size == 0:  # a node, or a group of a mesh: consecutive ranks, or every so many
            yield [_averaged_over(case, {r for r in case.ranks if r // size == case.rank // size})]
            apart = world // size
            yield [_averaged_over(case, {r for r in case.ranks if r % apart == case.rank % apart})]


def _averaged_over(case: ReceivedGradient, members: set[int]) -> Combination:
    return _weighted(case, lambda r, b, n: (r in members) / len(members))


def _summed(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [case.evenly(case.world)]


def _averaged_twice(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [case.evenly(1 / case.world)]


def _other_count(case: ReceivedGradient) -> Iterator[Choices]:
    for count in range(1, 2 * case.world + 1):
        if count != case.world and case.world > 1:
            yield [case.evenly(case.world / count)]


def _not_divided(case: ReceivedGradient) -> Iterator[Choices]:
    if case.passes > 1:
        yield [case.evenly(case.passes)]


def _divided_again(case: ReceivedGradient) -> Iterator[Choices]:
    if case.passes > 1:
        yield [case.evenly(1 / case.passes)]


Keep = Callable[[int, int], bool]
"""Whether a pass is kept, by its place and the number of passes."""


def _from(first: int) -> Keep:
    return lambda b, n: b >= first


def _before(end: int) -> Keep:
    return lambda b, n: b < end


def _without(lost: int) -> Keep:
    return lambda b, n: b != lost


def _only(kept: int) -> Keep:
    return lambda b, n: b == kept


def _kept_places(case: ReceivedGradient, keep: Keep) -> Choices:
    return [_weighted(case, lambda r, b, n: keep(b, n) / case.world)]


def _only_last(case: ReceivedGradient) -> Iterator[Choices]:
    if case.passes > 1:
        yield _kept_places(case, lambda b, n: b == n - 1)
        yield [_weighted(case, lambda r, b, n: float(r == case.rank and b == n - 1))]


def _first_missing(case: ReceivedGradient) -> Iterator[Choices]:
    for lost in range(1, case.passes - 1):
        yield _kept_places(case, _from(lost))


def _last_missing(case: ReceivedGradient) -> Iterator[Choices]:
    for kept in range(1, case.passes):
        yield _kept_places(case, _before(kept))


def _one_missing(case: ReceivedGradient) -> Iterator[Choices]:
    for lost in range(1, case.passes - 1):
        yield _kept_places(case, _without(lost))


def _partly_synchronised(case: ReceivedGradient) -> Iterator[Choices]:
    """Predict that all passes but some were averaged over ranks, and of these this rank has its own only."""
    if case.world > 1 and case.passes > 1:
        for place in range(case.passes):
            yield [_alone(case, _only(place))]
            yield [_alone(case, _without(place))]


def _alone(case: ReceivedGradient, alone: Keep) -> Combination:
    return _weighted(case, lambda r, b, n: float(r == case.rank) if alone(b, n) else 1 / case.world)


def _reduced_again(case: ReceivedGradient) -> Iterator[Choices]:
    """Predict that the sum so far was reduced over ranks again after every pass: summed, not averaged."""
    if case.world > 1 and case.passes > 1:
        for least in (0, 1, -1):
            yield [_growing(case, float(case.world), least)]


def _growing(case: ReceivedGradient, base: float, least: int) -> Combination:
    return _weighted(case, lambda r, b, n: base ** (n - 1 - b + least) / case.world)


def _not_zeroed(case: ReceivedGradient) -> Iterator[Choices]:
    if case.previous is not None:
        coefficients, before = case.evenly().coefficients, case.previous.received.nan_to_num(nan=0.0)
        yield [Combination(coefficients, before)]
        scale = case.step.passes[-1].scale if case.step.passes else 1.0
        if scale != 1.0:  # what was left has been unscaled already, and is unscaled again with the sum
            yield [Combination(coefficients, before / scale)]


def _one_step_late(case: ReceivedGradient) -> Iterator[Choices]:
    if case.previous is not None and case.place > 0:
        yield [Combination(case.evenly(0.0).coefficients, case.previous.received.nan_to_num(nan=0.0))]


def _scale_left_in(case: ReceivedGradient) -> Iterator[Choices]:
    scale = case.step.passes[-1].scale if case.step.passes else 1.0
    if scale != 1.0:
        yield [case.evenly(scale)]


def _unscaled_twice(case: ReceivedGradient) -> Iterator[Choices]:
    scale = case.step.passes[-1].scale if case.step.passes else 1.0
    if scale != 1.0:
        yield [case.evenly(1 / scale)]


def _sign_flipped(case: ReceivedGradient) -> Iterator[Choices]:
    yield [case.evenly(-1.0)]


def _zero(case: ReceivedGradient) -> Iterator[Choices]:
    yield [case.evenly(0.0)]


def _some_not_synchronised(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [case.evenly(), _own(case)]


def _some_summed(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [case.evenly(), case.evenly(case.world)]


def _some_averaged_twice(case: ReceivedGradient) -> Iterator[Choices]:
    if case.world > 1:
        yield [case.evenly(), case.evenly(1 / case.world)]


def _some_zero(case: ReceivedGradient) -> Iterator[Choices]:
    yield [case.evenly(), case.evenly(0.0)]


def _some_from_last(case: ReceivedGradient) -> Iterator[Choices]:
    if case.passes > 1:
        yield [case.evenly(), *_kept_places(case, lambda b, n: b == n - 1)]


HYPOTHESES = (
    GradientMistake("loss-scale-left-in", "amp", _scale_left_in,
        "those of the scaled loss",
        "call scaler.step(optimizer), which unscales them", 970),
    GradientMistake("unscaled-twice", "amp", _unscaled_twice,
        "divided by the loss scale of {scale} twice",
        "unscale them only once, in the trainer or in the GradScaler", 975),
    GradientMistake("zero", "optimizer", _zero,
        "all zero",
        "call zero_grad() after the optimizer's step, not before it", 950),
    GradientMistake("not-synchronised", "sync", _not_synchronised,
        "those of rank {rank}'s own samples",
        "they were never all-reduced: call the DistributedDataParallel object and not the module in it, outside "
        "no_sync()", 695),
    GradientMistake("summed-over-ranks", "averaging", _summed,
        "the sum over {world} ranks, not their mean",
        "divide by the world size after the all-reduce", 690),
    GradientMistake("another-ranks-gradient", "sync", _anothers,
        "those of another rank's samples alone",
        "average gradients over ranks instead of broadcasting them", 685),
    GradientMistake("only-last-micro-batch", "accumulation", _only_last,
        "those of the last of {passes} backward passes",
        "zero and synchronise gradients once a step, not for every micro-batch", 670),
    GradientMistake("first-micro-batches-missing", "accumulation", _first_missing,
        "without the first of {passes} backward passes",
        "look for a zero_grad() or an evaluation that clears gradients between the backward passes of a step", 665),
    GradientMistake("last-micro-batches-missing", "accumulation", _last_missing,
        "without the last of {passes} backward passes",
        "copy, clip and reduce them after the last backward pass of the step", 660),
    GradientMistake("micro-batch-missing", "accumulation", _one_missing,
        "without one of {passes} backward passes",
        "a micro-batch's gradient was lost or overwritten", 655),
    GradientMistake("averaged-twice", "averaging", _averaged_twice,
        "divided by the world size of {world} twice",
        "DistributedDataParallel averages already", 620),
    GradientMistake("some-micro-batches-not-synchronised", "accumulation", _partly_synchronised,
        "averaged over ranks for some of {passes} backward passes and rank {rank}'s own for others",
        "run all micro-batches but the last inside no_sync(), and the last one outside", 615),
    GradientMistake("reduced-with-every-micro-batch", "accumulation", _reduced_again,
        "reduced over ranks again with every backward pass",
        "reduce them once a step, after the last backward pass", 610),
    GradientMistake("previous-step-not-zeroed", "accumulation", _not_zeroed,
        "this step's plus those of the step before",
        "call zero_grad() before each step's first backward pass", 605),
    GradientMistake("averaged-over-some-ranks", "sync", _some_ranks,
        "averaged over some of the {world} ranks only",
        "all-reduce over all ranks, not over a part of them such as a node", 600),
    GradientMistake("one-step-late", "sync", _one_step_late,
        "those of the step before",
        "wait for the all-reduce before the optimizer steps", 595),
    GradientMistake("divided-twice", "accumulation", _divided_again,
        "divided by the {passes} backward passes once more",
        "divide only once, in the loss or after the backward pass", 590),
    GradientMistake("not-divided-by-micro-batches", "accumulation", _not_divided,
        "multiplied by the {passes} backward passes",
        "look for code that multiplies gradients between the backward pass and the step", 585),
    GradientMistake("sign-flipped", "optimizer", _sign_flipped,
        "the right ones with the opposite sign",
        "look for code that negates them between the backward pass and the step", 580),
    GradientMistake("divided-by-another-count", "averaging", _other_count,
        "{factor} × the right ones",
        "divide the sum over ranks by the world size",
        360),
    GradientMistake("some-parameters-not-synchronised", "sync", _some_not_synchronised,
        "averaged for some parameters and rank {rank}'s own for others",
        "all-reduce the gradients of all parameters", 355),
    GradientMistake("some-tensors-summed", "averaging", _some_summed,
        "averaged for some parameters and summed over {world} ranks for others",
        "divide the gradients of all parameters by the world size", 350),
    GradientMistake("some-tensors-averaged-twice", "averaging", _some_averaged_twice,
        "divided by the world size of {world} twice for some parameters",
        "average these parameters only once", 345),
    GradientMistake("some-zero", "optimizer", _some_zero,
        "right for some parameters and zero for others",
        "look for code that zeroes these gradients between the backward pass and the step", 340),
    GradientMistake("micro-batch-missing", "accumulation", _some_from_last,
        "those of the last of {passes} backward passes for some parameters",
        "do not zero these gradients in every micro-batch", 335),
)  # fmt: skip
"""Every known mistake, in any order: the most specific one that fits at every wrong step and rank is the cause."""
