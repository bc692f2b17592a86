"""Parameters on which some ranks' losses do not depend."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, mean
from harness.judge.causes.mistakes.sync import some_tensors_own
from harness.judge.oracle.oracle import clipped, mean_gradient


def _thrown_away(scene: Scene) -> Iterable[Tensors]:
    if names := scene.unused & scene.truth.raw.keys():
        yield {name: value for name, value in scene.truth.contract.items() if name not in names}


def _averaged_over_users(scene: Scene) -> Iterable[Tensors]:
    if scene.unused and scene.micro_batches == 1 and scene.clip_norm is None:
        (parts,) = scene.truth.parts
        yield {name: mean([part for part in parts if name in part])[name] for name in scene.truth.raw}


def _own_where_unused(scene: Scene) -> Iterable[Tensors]:
    if not scene.unused or not (parts := scene.own(scene.rank)):
        return
    own, right = mean_gradient(parts), scene.truth.contract
    yield {
        name: own.get(name, torch.zeros_like(value)) if name in scene.unused else value for name, value in right.items()
    }
    # Wrong at every step alike it would be no matter of what a step uses.
    if not scene.always_wrong:
        yield from some_tensors_own(scene)
        yield clipped(own, scene.clip_norm)


def _stale_where_unused(scene: Scene) -> Iterable[Tensors]:
    """Predict that who has no gradient takes part with the last one he had."""
    if not scene.unused or scene.micro_batches > 1 or scene.clip_norm is not None:
        return
    parts = [dict(part) for part in scene.truth.parts[0]]
    for truth in scene.past:
        for rank, part in enumerate(parts[: len(truth.parts[0])]):
            parts[rank] = {**truth.parts[0][rank], **part}
    yield mean(parts)


EXPLANATIONS = (
    Explanation(
        "unused-somewhere-stepped-nowhere", "unused-params",
        "missing where some rank did not use a parameter",
        "a rank without a gradient counts as zero in the average; it does not cancel it", _thrown_away,
    ),
    Explanation(
        "averaged-over-its-users", "unused-params",
        "divided by the number of ranks that used a parameter, not by {world}",
        "a rank without a gradient counts as zero in the average", _averaged_over_users,
    ),
    Explanation(
        "unused-and-not-synchronised", "unused-params",
        "averaged for some parameters and rank {rank}'s own for others, in a step that does not use them all",
        "a bucket was never reduced: is find_unused_parameters set?", _own_where_unused,
    ),
    Explanation(
        "stale-where-unused", "unused-params",
        "averaged with the last gradients of ranks that had none in this step",
        "gradients that no backward writes must be zeroed or None", _stale_where_unused,
    ),
)  # fmt: skip
