"""Ranks' shares that are all there, but combined wrongly."""

from __future__ import annotations

from plumbline.judge.mistakes.case import (
    Combination,
    GradientCase,
    GradientMistake,
    Predictions,
    SomeParameters,
    scaled,
)


def _summed(case: GradientCase) -> Predictions:
    if case.world > 1:
        yield scaled(case.world)


def _averaged_twice(case: GradientCase) -> Predictions:
    if case.world > 1:
        yield scaled(1 / case.world)


def _other_count(case: GradientCase) -> Predictions:
    """Predict the sum over ranks divided by another small number, or the mean multiplied by one: the nearest one."""
    if case.world > 1:
        counts = [count for count in range(1, 2 * case.world + 1) if count != case.world]
        factors = [case.world / count for count in counts] + [count / case.world for count in counts]
        yield scaled(min(factors, key=lambda factor: abs(factor - case.factor)))


def _some_summed(case: GradientCase) -> Predictions:
    if case.world > 1:
        yield SomeParameters(scaled(case.world))


def _some_averaged_twice(case: GradientCase) -> Predictions:
    if case.world > 1:
        yield SomeParameters(scaled(1 / case.world))


def _own_share_counted_again(case: GradientCase) -> Predictions:
    """Predict that each rank's own share was added to the average of all, or is missing from it."""
    world, own = case.world, case.rank
    if world > 1 and case.micro_batches == 1 and case.has_shares[own]:
        for more in (float(world), 1.0):
            yield Combination(lambda r, b, n, more=more: 1 + more * (r == own))  # type: ignore[misc]
        yield Combination(lambda r, b, n: world / (world - 1) * (r != own))


MISTAKES = (
    GradientMistake("summed-over-ranks", "averaging", _summed,
        "the sum over {world} ranks, not their mean",
        "divide the loss, or the result of the all-reduce, by the world size", 690),
    GradientMistake("averaged-twice", "averaging", _averaged_twice,
        "divided by the world size of {world} twice",
        "divide once: DistributedDataParallel averages already", 620),
    GradientMistake("divided-by-another-count", "averaging", _other_count,
        "{factor} × the right ones at every step",
        "divide the sum over ranks by the world size, not by the number of nodes or of GPUs per node", 360),
    GradientMistake("some-tensors-summed", "averaging", _some_summed,
        "averaged for some parameters and summed over {world} ranks for others",
        "divide the gradients of all parameters by the world size", 355),
    GradientMistake("some-tensors-averaged-twice", "averaging", _some_averaged_twice,
        "divided by the world size of {world} twice for some parameters",
        "average the gradients of these parameters once", 350),
    GradientMistake("own-part-counted-again", "averaging", _own_share_counted_again,
        "the average, but with rank {rank}'s own part counted twice or left out",
        "add each rank's gradient to the all-reduced sum exactly once", 340),
)  # fmt: skip
