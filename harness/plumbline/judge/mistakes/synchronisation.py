"""Gradients that were not exchanged between ranks, or too late."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from plumbline.judge.hypothesis import register
from plumbline.judge.truth import (
    Combination,
    GradientCase,
    GradientMistake,
    Predictions,
    SomeParameters,
    Weight,
    even,
)

MOST_RANKS = 16
"""Up to this world size, every evenly spaced set of ranks is tried; above it, only this rank's own groups, for time."""


def only(ranks: Collection[int], factor: float = 1.0) -> Weight:
    """Count only the shares of some ranks, each with ``factor``."""
    return lambda r, b, n: factor * (r in ranks)


def _not_synchronised(case: GradientCase) -> Predictions:
    if case.world > 1 and case.has_shares[case.rank]:
        yield Combination(only({case.rank}, case.world))
        yield Combination(only({case.rank}))


def _anothers(case: GradientCase) -> Predictions:
    for rank in range(case.world):  # its own gradient as well: the one that it broadcasts
        if case.world > 1 and case.has_shares[rank]:
            yield Combination(only({rank}, case.world))


def _some_ranks(case: GradientCase) -> Predictions:
    """Predict the mean over ranks with consecutive or equally spaced numbers, with or without this one."""
    for chosen in dict.fromkeys(_sets_of_ranks(case)):
        if 0 < len(chosen) < case.world and all(case.has_shares[rank] for rank in chosen):
            yield Combination(only(set(chosen), case.world / len(chosen)))
            yield Combination(only(set(chosen)))  # divided by the world size all the same


def _sets_of_ranks(case: GradientCase) -> Iterator[tuple[int, ...]]:
    world, own = case.world, case.rank
    if world <= MOST_RANKS:
        for stride in range(1, world):
            for first in range(world):
                yield from (tuple(range(first, last + 1, stride)) for last in range(first, world, stride))
        return
    for size in range(2, world):
        if world % size == 0:
            yield tuple(range(own // size * size, (own // size + 1) * size))
            yield tuple(range(own % size, world, size))


def _some_parameters_own(case: GradientCase) -> Predictions:
    if case.world > 1 and case.has_shares[case.rank]:
        yield SomeParameters(Combination(only({case.rank}, case.world)))


def _one_step_late(case: GradientCase) -> Predictions:
    if case.has_earlier_step:
        yield Combination(even(0.0), earlier=even(1.0))
    elif case.index == 0:
        yield Combination(even(0.0))


def _others_one_step_late(case: GradientCase) -> Predictions:
    own = case.rank
    if case.world > 1 and case.has_earlier_step and case.micro_batches == 1:
        yield Combination(only({own}), earlier=lambda r, b, n: float(r != own))


def _some_ranks_one_step_late(case: GradientCase) -> Predictions:
    for late in range(case.world) if case.world > 1 and case.has_earlier_step else ():
        combination = Combination(lambda r, b, n, late=late: float(r != late), earlier=only({late}))  # type: ignore[misc]
        yield combination
        yield SomeParameters(combination)


def _some_parameters_one_step_late(case: GradientCase) -> Predictions:
    if case.has_earlier_step:
        yield SomeParameters(Combination(even(0.0), earlier=even(1.0)))


LATE = (
    GradientMistake("one-step-late", "sync", _one_step_late,
        "the right ones of the previous step",
        "wait for the all-reduce before the optimizer steps", 615),
    GradientMistake("others-one-step-late", "sync", _others_one_step_late,
        "made of rank {rank}'s own part and the other ranks' parts of the previous step",
        "wait for the all-reduce before the optimizer steps", 610),
)  # fmt: skip
"""Gradients of an earlier step."""

register(
    GradientCase,
    GradientMistake("not-synchronised", "sync", _not_synchronised,
        "those of rank {rank}'s own samples alone",
        "call the DistributedDataParallel object, not the module in it, and not inside no_sync()", 685),
    GradientMistake("another-ranks-gradient", "sync", _anothers,
        "those of a single rank's samples",
        "average gradients over ranks instead of broadcasting them", 680),
    *LATE,
    GradientMistake("averaged-over-some-ranks", "sync", _some_ranks,
        "averaged over some of the {world} ranks only",
        "all-reduce over all ranks, not over a part of them such as a node", 330),
    GradientMistake("some-parameters-not-synchronised", "sync", _some_parameters_own,
        "averaged for some parameters and rank {rank}'s own for others",
        "all-reduce the gradients of all parameters", 325),
    GradientMistake("some-ranks-one-step-late", "sync", _some_ranks_one_step_late,
        "averages in which one rank's part is that of the previous step",
        "give each rank's gradient of this step to the all-reduce, and wait for it", 324),
    GradientMistake("some-parameters-one-step-late", "sync", _some_parameters_one_step_late,
        "right for some parameters, and for others the right ones of the previous step",
        "wait for every bucket's all-reduce before the optimizer steps", 323),
)  # fmt: skip
