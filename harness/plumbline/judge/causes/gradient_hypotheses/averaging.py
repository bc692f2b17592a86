"""Ranks' parts that are all there, but combined wrongly."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import mean, scaled
from plumbline.judge.causes.gradient_case import GradientCase, GradientHypothesis, Gradients
from plumbline.judge.oracle.oracle import clipped


def _summed(case: GradientCase) -> Gradients:
    if case.world > 1:
        yield clipped(scaled(case.world, case.expected.raw), case.clip_norm)


def _averaged_twice(case: GradientCase) -> Gradients:
    if case.world > 1:
        yield clipped(scaled(1 / case.world, case.expected.raw), case.clip_norm)


def _other_count(case: GradientCase) -> Gradients:
    """Predict the sum over ranks divided by another small number, or the mean multiplied by one: the nearest one."""
    if case.world > 1:
        counts = [count for count in range(1, 2 * case.world + 1) if count != case.world]
        factors = [case.world / count for count in counts] + [count / case.world for count in counts]
        nearest = min(factors, key=lambda factor: abs(factor - case.pattern.factor))
        yield clipped(scaled(nearest, case.expected.raw), case.clip_norm)


def _some_tensors_summed(case: GradientCase) -> Gradients:
    if case.world > 1:
        yield from case.with_nearer(scaled(case.world, case.expected.raw))


def _some_tensors_averaged_twice(case: GradientCase) -> Gradients:
    if case.world > 1:
        yield from case.with_nearer(scaled(1 / case.world, case.expected.raw))


def _some_tensors_multiplied(case: GradientCase) -> Gradients:
    yield from case.with_nearer(scaled(case.pattern.odd_factor, case.expected.raw))


def _extremes(case: GradientCase) -> Gradients:
    """Predict a reduction that takes the largest, the smallest or the middle entry of all ranks."""
    if case.world == 1 or case.micro_batches > 1 or case.clip_norm is not None:
        return
    (parts,) = case.expected.parts
    for reduce in (torch.amax, torch.amin, lambda stack, dim: stack.median(dim).values):
        yield {
            name: reduce(torch.stack([part.get(name, torch.zeros_like(value)) for part in parts]), 0)
            for name, value in case.expected.raw.items()
        }


def _constant(case: GradientCase) -> Gradients:
    if case.world > 1 and case.micro_batches == 1 == case.accumulate:
        yield clipped(scaled(case.pattern.factor, case.expected.raw), case.clip_norm)


def _added_again(case: GradientCase) -> Gradients:
    """Predict that each rank's own part was added to the average of all, or is missing from it."""
    for part in (part for parts in case.own_parts(case.rank) for part in parts):
        if case.world > 1 and case.micro_batches == 1 and case.clip_norm is None:
            for factor in (1.0, 1 / case.world):
                yield {name: value + factor * part.get(name, 0 * value) for name, value in case.expected.raw.items()}
                others = mean([other for other in case.shares if other is not part])
                yield {name: others.get(name, 0 * value) for name, value in case.expected.raw.items()}


HYPOTHESES = (
    GradientHypothesis("summed-over-ranks", "averaging", _summed,
        "the sum over {world} ranks, not their mean",
        "the loss or the all-reduce is not divided by the world size", 690),
    GradientHypothesis("averaged-twice", "averaging", _averaged_twice,
        "divided by the world size of {world} twice",
        "DistributedDataParallel averages already", 620),
    GradientHypothesis("divided-by-another-count", "averaging", _other_count,
        "{factor} × the right ones at every step",
        "the sum over ranks is divided by a number that is not the world size: GPUs of a node, nodes, one too many?",
        360),
    GradientHypothesis("some-tensors-summed", "averaging", _some_tensors_summed,
        "averaged for some parameters and summed over {world} ranks for others",
        "the division by the world size leaves parameters out", 355),
    GradientHypothesis("some-tensors-averaged-twice", "averaging", _some_tensors_averaged_twice,
        "divided by the world size of {world} twice for some parameters",
        "parameters that are averaged already are averaged again", 350),
    GradientHypothesis("reduced-by-an-extreme", "averaging", _extremes,
        "the largest, smallest or middle entries of all ranks, not their mean",
        "the operation of the all-reduce is not a sum", 345),
    GradientHypothesis("own-part-counted-again", "averaging", _added_again,
        "the average with rank {rank}'s own part counted once more or left out",
        "the all-reduced sum contains the rank's own gradient twice, or not at all", 340),
    GradientHypothesis("some-tensors-multiplied", "averaging", _some_tensors_multiplied,
        "right for some parameters and {odd_factor} × the right ones for others",
        "what multiplies, or divides, the gradients of these parameters alone: a hook, a group, a reduction?", 94),
    GradientHypothesis("scaled-by-a-constant", "averaging", _constant,
        "{factor} × the right ones at every step",
        "what are the loss and the all-reduce divided by, and what are they multiplied by?", 75),
)  # fmt: skip
