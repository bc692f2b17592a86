"""Gradients that were not exchanged between ranks, or too late."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _own_only(case: GradientCase) -> Gradients:
    if case.world > 1 and (own := case.own_parts(case.rank)):
        yield clipped(mean_gradient(own), case.clip_norm)
        yield clipped(scaled(1 / case.world, mean_gradient(own)), case.clip_norm)


def _another_ranks(case: GradientCase) -> Gradients:
    for rank in range(case.world):
        if rank != case.rank and (own := case.own_parts(rank)):
            yield clipped(mean_gradient(own), case.clip_norm)


def _some_ranks(case: GradientCase) -> Gradients:
    """Predict the mean over ranks with consecutive or equally spaced numbers, with or without this one."""
    world = case.world
    tried = set()
    for stride in range(1, world):
        for first in range(world):
            for last in range(first, world, stride):
                chosen = tuple(range(first, last + 1, stride))
                if len(chosen) < world and chosen not in tried:
                    tried.add(chosen)
                    parts = [[groups[r] for r in chosen if r < len(groups)] for groups in case.expected.parts]
                    if all(parts):
                        yield clipped(mean_gradient(parts), case.clip_norm)
                        # The same, but divided by the world size.
                        short = scaled(len(chosen) / world, mean_gradient(parts))
                        yield clipped(short, case.clip_norm)


def some_tensors_own(case: GradientCase) -> Gradients:
    """Predict each tensor from the rank's own gradient where that is nearer than the average."""
    if case.world > 1 and (parts := case.own_parts(case.rank)):
        own = mean_gradient(parts)
        yield from case.with_nearer(
            {name: own.get(name, torch.zeros_like(value)) for name, value in case.expected.raw.items()}
        )


def _one_step_late(case: GradientCase) -> Gradients:
    if case.earlier_expected:
        yield case.earlier_expected[0].contract
    elif case.index == 0:
        yield {name: torch.zeros_like(value) for name, value in case.expected.contract.items()}


def _others_one_step_late(case: GradientCase) -> Gradients:
    """Predict an average whose other ranks' parts are those of the step before."""
    if case.world == 1 or not case.earlier_expected or case.clip_norm is not None or case.micro_batches > 1:
        return
    now, then = case.expected.parts[0], case.earlier_expected[0].parts[0]
    if len(now) == len(then):
        yield mean_gradient([[now[rank] if rank == case.rank else then[rank] for rank in range(len(now))]])


def _some_ranks_one_step_late(case: GradientCase) -> Gradients:
    """Predict an average to which some of the ranks add their parts of the step before."""
    if case.world == 1 or not case.earlier_expected:
        return
    then = case.earlier_expected[0]
    for late in range(case.world):
        parts = [case.own_parts(rank, then if rank == late else None) for rank in range(case.world)]
        if all(parts):
            total = mean_gradient([[mean_gradient(own) for own in parts]])
            yield clipped(total, case.clip_norm)
            yield from case.with_nearer(total)


def _some_tensors_one_step_late(case: GradientCase) -> Gradients:
    if case.earlier_expected:
        yield from case.with_nearer(case.earlier_expected[0].raw)


def _exchanged(case: GradientCase) -> Gradients:
    """Predict each tensor from the nearest one of its shape."""
    raw, factor = case.expected.raw, case.common_factor
    alike = {name: [other for other in raw.values() if other.shape == value.shape] for name, value in raw.items()}
    yield from case.with_nearer(
        {n: min(few, key=lambda one: distance(case.observed[n], factor * one)) for n, few in alike.items()}
    )


def _rows_in_another_order(case: GradientCase) -> Gradients:
    """Predict some tensors whose rows, or entries, are reversed or shifted by one."""
    raw = {name: value for name, value in case.expected.raw.items() if value.dim()}
    yield from case.with_nearer({name: value.flip(0) for name, value in raw.items()})
    for shift in (1, -1):
        yield from case.with_nearer({name: value.roll(shift, 0) for name, value in raw.items()})


LATE = (
    GradientHypothesis("one-step-late", "sync", _one_step_late,
        "those that were right one step before",
        "the all-reduce was not waited for, or its result is used in the next step", 615),
    GradientHypothesis("others-one-step-late", "sync", _others_one_step_late,
        "made of rank {rank}'s own part and the other ranks' parts of the step before",
        "the all-reduce was not waited for", 610),
)  # fmt: skip
"""Gradients of an earlier step."""

HYPOTHESES = (
    GradientHypothesis("not-synchronised", "sync", _own_only,
        "those of rank {rank}'s own samples",
        "they were never all-reduced: does the forward go through the DDP object, outside no_sync()?", 685),
    GradientHypothesis("another-ranks-gradient", "sync", _another_ranks,
        "those of another rank's samples alone",
        "a gradient was broadcast instead of averaged", 680),
    *LATE,
    GradientHypothesis("averaged-over-some-ranks", "sync", _some_ranks,
        "averaged over some of the {world} ranks only",
        "the process group of the all-reduce is not the whole world: is it one node's?", 330),
    GradientHypothesis("some-parameters-not-synchronised", "sync", some_tensors_own,
        "averaged for some parameters and rank {rank}'s own for others",
        "the all-reduce leaves parameters out", 325),
    GradientHypothesis("some-ranks-one-step-late", "sync", _some_ranks_one_step_late,
        "averages to which one of the ranks adds its part of the step before",
        "does each rank hand over the gradient of this step, and wait for the all-reduce?", 324),
    GradientHypothesis("some-parameters-one-step-late", "sync", _some_tensors_one_step_late,
        "right for some parameters, and for others those that were right one step before",
        "does every bucket's all-reduce end before the step?", 323),
    GradientHypothesis("parameters-exchanged", "sync", _exchanged,
        "right, but some parameters have those of another one of their shape",
        "is a flat buffer unpacked in the order in which it was packed, the same on every rank?", 322),
    GradientHypothesis("rows-in-another-order", "sync", _rows_in_another_order,
        "right, but for some parameters with rows in another order",
        "is a gathered or flat tensor put together in the order in which it was taken apart?", 321),
)  # fmt: skip
