"""Ranks that did not hear of one another, or heard too late."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, scaled
from harness.judge.oracle.noise import distance
from harness.judge.oracle.oracle import clipped, mean_gradient


def _own_only(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1 and (own := scene.own(scene.rank)):
        yield clipped(mean_gradient(own), scene.clip_norm)
        yield clipped(scaled(1 / scene.world, mean_gradient(own)), scene.clip_norm)


def _another_ranks(scene: Scene) -> Iterable[Tensors]:
    for rank in range(scene.world):
        if rank != scene.rank and (own := scene.own(rank)):
            yield clipped(mean_gradient(own), scene.clip_norm)


def _some_ranks(scene: Scene) -> Iterable[Tensors]:
    """Predict the mean over ranks that lie side by side or at equal distances, this one among them or not."""
    world = scene.world
    tried = set()
    for stride in range(1, world):
        for first in range(world):
            for last in range(first, world, stride):
                chosen = tuple(range(first, last + 1, stride))
                if len(chosen) < world and chosen not in tried:
                    tried.add(chosen)
                    parts = [[groups[r] for r in chosen if r < len(groups)] for groups in scene.truth.parts]
                    if all(parts):
                        yield clipped(mean_gradient(parts), scene.clip_norm)
                        # Divided by the world size all the same: the others' part is missing.
                        short = scaled(len(chosen) / world, mean_gradient(parts))
                        yield clipped(short, scene.clip_norm)


def _some_tensors_own(scene: Scene) -> Iterable[Tensors]:
    """Take each tensor from the rank's own gradient where that is nearer than the average."""
    if scene.world == 1 or scene.clip_norm is not None or not (parts := scene.own(scene.rank)):
        return
    own, right = mean_gradient(parts), scene.truth.contract
    own = {name: own.get(name, torch.zeros_like(value)) for name, value in right.items()}
    local = {
        name for name in right if distance(scene.given[name], own[name]) < distance(scene.given[name], right[name])
    }
    if local and local != set(right):
        yield {name: own[name] if name in local else right[name] for name in right}


def _one_step_late(scene: Scene) -> Iterable[Tensors]:
    if scene.past:
        yield scene.past[0].contract
    elif scene.index == 0:
        yield {name: torch.zeros_like(value) for name, value in scene.truth.contract.items()}


def _others_one_step_late(scene: Scene) -> Iterable[Tensors]:
    """Predict an average whose other ranks' parts are those of the step before."""
    if scene.world == 1 or not scene.past or scene.clip_norm is not None or scene.micro_batches > 1:
        return
    now, then = scene.truth.parts[0], scene.past[0].parts[0]
    if len(now) == len(then):
        yield mean_gradient([[now[rank] if rank == scene.rank else then[rank] for rank in range(len(now))]])


SPECIFIC = (
    Explanation(
        "not-synchronised", "sync",
        "those of rank {rank}'s own samples",
        "they were never all-reduced: does the forward go through the DDP object, outside no_sync()?", _own_only,
    ),
    Explanation(
        "another-ranks-gradient", "sync",
        "those of another rank's samples alone",
        "a gradient was broadcast where an average was meant", _another_ranks,
    ),
)  # fmt: skip

LATE = (
    Explanation(
        "one-step-late", "sync",
        "those that were right one step before",
        "the all-reduce was not waited for, or its result is used in the next step", _one_step_late,
    ),
    Explanation(
        "others-one-step-late", "sync",
        "made of rank {rank}'s own part and the other ranks' from the step before",
        "the all-reduce was not waited for", _others_one_step_late,
    ),
)  # fmt: skip

GENERAL = (
    Explanation(
        "averaged-over-some-ranks", "sync",
        "averaged over some of the {world} ranks only",
        "the process group of the all-reduce is not the world: is it that of a node?", _some_ranks,
    ),
    Explanation(
        "some-parameters-not-synchronised", "sync",
        "averaged for some parameters and rank {rank}'s own for others",
        "the all-reduce leaves parameters out", _some_tensors_own,
    ),
)  # fmt: skip

some_tensors_own = _some_tensors_own
