"""Gradients that were not exchanged between ranks, or too late."""

from __future__ import annotations

import torch

from harness.judge.causes.combinations import scaled
from harness.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from harness.judge.oracle.noise import distance
from harness.judge.oracle.oracle import clipped, mean_gradient


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
    if case.world == 1 or case.clip_norm is not None or not (parts := case.own_parts(case.rank)):
        return
    own, right = mean_gradient(parts), case.expected.contract
    own = {name: own.get(name, torch.zeros_like(value)) for name, value in right.items()}
    local = {
        name for name in right if distance(case.observed[name], own[name]) < distance(case.observed[name], right[name])
    }
    if local and local != set(right):
        yield {name: own[name] if name in local else right[name] for name in right}


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
)  # fmt: skip
