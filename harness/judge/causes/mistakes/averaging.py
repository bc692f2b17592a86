"""Everybody's part is there, and they were put together wrongly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, mean, scaled
from harness.judge.oracle.noise import distance
from harness.judge.oracle.oracle import clipped


def _summed(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1:
        yield clipped(scaled(scene.world, scene.truth.raw), scene.clip_norm)


def _averaged_twice(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1:
        yield clipped(scaled(1 / scene.world, scene.truth.raw), scene.clip_norm)


def _other_count(scene: Scene) -> Iterable[Tensors]:
    """Predict the sum over ranks divided by another small number, or the mean multiplied by one: by which is fitted."""
    if scene.world > 1:
        counts = [count for count in range(1, 2 * scene.world + 1) if count != scene.world]
        factors = [scene.world / count for count in counts] + [count / scene.world for count in counts]
        nearest = min(factors, key=lambda factor: abs(factor - scene.factor))
        yield clipped(scaled(nearest, scene.truth.raw), scene.clip_norm)


def _some_tensors(factor: float, scene: Scene) -> Iterable[Tensors]:
    """Predict the right gradient with those tensors multiplied that come nearer by it."""
    if scene.world > 1 and scene.clip_norm is None:
        right, given = scene.truth.raw, scene.given
        yield {
            name: value * factor if distance(given[name], value * factor) < distance(given[name], value) else value
            for name, value in right.items()
        }


def _some_tensors_summed(scene: Scene) -> Iterable[Tensors]:
    yield from _some_tensors(scene.world, scene)


def _some_tensors_averaged_twice(scene: Scene) -> Iterable[Tensors]:
    yield from _some_tensors(1 / scene.world, scene)


def _extremes(scene: Scene) -> Iterable[Tensors]:
    """Predict a reduction that takes the largest, the smallest or the middle entry of all ranks."""
    if scene.world == 1 or scene.micro_batches > 1 or scene.clip_norm is not None:
        return
    (parts,) = scene.truth.parts
    for reduce in (torch.amax, torch.amin, lambda stack, dim: stack.median(dim).values):
        yield {
            name: reduce(torch.stack([part.get(name, torch.zeros_like(value)) for part in parts]), 0)
            for name, value in scene.truth.raw.items()
        }


def _constant(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1 and scene.micro_batches == 1 == scene.accumulate:
        yield clipped(scaled(scene.factor, scene.truth.raw), scene.clip_norm)


def _added_again(scene: Scene) -> Iterable[Tensors]:
    """Predict that each rank's own part came on top of the average of all."""
    for part in (part for parts in scene.own(scene.rank) for part in parts):
        if scene.world > 1 and scene.micro_batches == 1 and scene.clip_norm is None:
            for factor in (1.0, 1 / scene.world):
                yield {name: value + factor * part.get(name, 0 * value) for name, value in scene.truth.raw.items()}
                others = mean([p for groups in scene.truth.parts for p in groups if p is not part])
                yield {name: others.get(name, 0 * value) for name, value in scene.truth.raw.items()}


SPECIFIC = (
    Explanation(
        "summed-over-ranks", "averaging",
        "the sum over {world} ranks, not their mean",
        "the loss or the all-reduce is not divided by the world size", _summed,
    ),
)  # fmt: skip

TWICE = (
    Explanation(
        "averaged-twice", "averaging",
        "divided by the world size of {world} twice",
        "DDP averages already", _averaged_twice,
    ),
)  # fmt: skip

GENERAL = (
    Explanation(
        "divided-by-another-count", "averaging",
        "{factor} × the right ones at every step",
        "the sum over ranks is divided by another number than the world size: gpus of a node, nodes, one too many?",
        _other_count,
    ),
    Explanation(
        "some-tensors-summed", "averaging",
        "averaged for some parameters and summed over {world} ranks for others",
        "the division by the world size leaves parameters out", _some_tensors_summed,
    ),
    Explanation(
        "some-tensors-averaged-twice", "averaging",
        "divided by the world size of {world} twice for some parameters",
        "parameters that are averaged already are averaged again", _some_tensors_averaged_twice,
    ),
    Explanation(
        "reduced-by-an-extreme", "averaging",
        "the largest, smallest or middle entries of all ranks, not their mean",
        "the operation of the all-reduce is not a sum", _extremes,
    ),
    Explanation(
        "own-part-counted-again", "averaging",
        "the average with rank {rank}'s own part counted once more or left out",
        "what is added up holds the rank's own gradient twice, or not at all", _added_again,
    ),
)  # fmt: skip

CONSTANT = (
    Explanation(
        "scaled-by-a-constant", "averaging",
        "{factor} × the right ones at every step",
        "what are the loss and the all-reduce divided by, and what multiplied by?", _constant,
    ),
)  # fmt: skip
