"""Clipped at the wrong moment, or by the wrong norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, flat, mean, scaled
from harness.judge.oracle.noise import norm
from harness.judge.oracle.oracle import clipped, mean_gradient


def _not_clipped(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        yield scene.truth.raw


def _before_unscaling(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None and scene.step.scale:
        yield clipped(scene.truth.raw, scene.clip_norm / scene.step.scale)


def _before_averaging(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None and scene.world > 1:
        ranks = [
            clipped(mean_gradient(own), scene.clip_norm) for rank in range(scene.world) if (own := scene.own(rank))
        ]
        yield mean_gradient([ranks])


def _every_micro_batch(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None and scene.micro_batches > 1:
        yield mean_gradient([[clipped(mean_gradient([groups]), scene.clip_norm)] for groups in scene.truth.parts])
        yield mean_gradient([[clipped(part, scene.clip_norm) for part in groups] for groups in scene.truth.parts])


def _tensor_by_tensor(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        yield {
            name: value for n, v in scene.truth.raw.items() for name, value in clipped({n: v}, scene.clip_norm).items()
        }


def _shard_by_shard(scene: Scene) -> Iterable[Tensors]:
    """Predict that each rank scaled its rows of every tensor, as fully_shard divides them, whatever the factors."""
    if scene.clip_norm is None or scene.world == 1:
        return
    right = {name: value.chunk(scene.world) for name, value in scene.truth.raw.items() if value.dim()}
    given = {name: scene.given[name].chunk(scene.world) for name in right}
    made: dict[str, list[torch.Tensor]] = {name: [] for name in right}
    for rank in range(scene.world):
        names = [name for name, rows in right.items() if rank < len(rows)]
        square = sum(float((right[name][rank] ** 2).sum()) for name in names)
        along = sum(float((right[name][rank] * given[name][rank]).sum()) for name in names)
        if along < 0:
            return
        for name in names:
            made[name].append(right[name][rank] * (along / square if square else 0.0))
    yield scene.truth.raw | {name: torch.cat(rows) for name, rows in made.items()}


def _by_value(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        limit = scene.clip_norm
        yield {name: value.clamp(-limit, limit) for name, value in scene.truth.raw.items()}


def _to_another_length(scene: Scene) -> Iterable[Tensors]:
    """Predict the right direction with whatever length it has."""
    if scene.clip_norm is not None:
        names = list(scene.truth.raw)
        right, given = flat(scene.truth.raw, scene.truth.raw, names), flat(scene.given, scene.truth.raw, names)
        if norm(right):
            factor = float(given @ right / (right @ right))
            if factor > 0:
                yield scaled(factor, scene.truth.raw)


def _some_tensors(scene: Scene) -> Iterable[Tensors]:
    """Predict tensors each with a length of its own and the right direction."""
    if scene.clip_norm is None:
        return
    total = {}
    for name, right in scene.truth.raw.items():
        square = float((right * right).sum())
        factor = float((scene.given[name] * right).sum()) / square if square else 0.0
        if factor < 0:
            return
        total[name] = factor * right
    yield total


def _unasked(scene: Scene) -> Iterable[Tensors]:
    """Predict one limit for every gradient that is wrong, or one for each rank's share in it."""
    if scene.clip_norm is None:
        yield clipped(scene.truth.raw, scene.limit)
        if scene.limits and min(scene.limits) > 0:
            (parts,) = scene.truth.parts
            yield mean([clipped(part, limit) for part, limit in zip(parts, scene.limits, strict=True)])


UNSCALED = (
    Explanation(
        "clipped-before-unscaling", "clipping",
        "clipped while they were still multiplied by the loss scale of {scale}",
        "call scaler.unscale_(optimizer) before clipping", _before_unscaling,
    ),
)  # fmt: skip

EXPLANATIONS = (
    Explanation(
        "not-clipped", "clipping",
        "not clipped", "clipping is missing, or comes after the step", _not_clipped,
    ),
    Explanation(
        "clipped-before-averaging", "clipping",
        "the mean of gradients that each rank clipped by itself",
        "clip after the all-reduce", _before_averaging,
    ),
    Explanation(
        "clipped-every-micro-batch", "clipping",
        "the mean of micro-batches that were clipped one by one",
        "clip once, when the window is complete", _every_micro_batch,
    ),
    Explanation(
        "clipped-to-another-length", "clipping",
        "right in direction, and not in length",
        "which norm is compared with which limit, of which tensors, on which rank?", _to_another_length,
    ),
    Explanation(
        "clipped-tensor-by-tensor", "clipping",
        "clipped tensor by tensor", "the norm is that of all gradients together", _tensor_by_tensor,
    ),
    Explanation(
        "clipped-shard-by-shard", "clipping",
        "right in direction shard by shard, each rank's with a length of its own",
        "the norm is that of all shards together, which clip_grad_norm_ takes of DTensors", _shard_by_shard,
    ),
    Explanation(
        "clipped-by-value", "clipping",
        "clipped entry by entry", "the norm is meant, not the value", _by_value,
    ),
    Explanation(
        "clipped-in-groups", "clipping",
        "right in direction tensor by tensor, each with a length of its own",
        "the norm is that of all gradients together, and one factor scales them all", _some_tensors,
    ),
)  # fmt: skip

UNASKED = (
    Explanation(
        "clipped-although-nobody-asked", "clipping",
        "as long as a limit that the workload does not have",
        "does the trainer clip by default?", _unasked,
    ),
)  # fmt: skip
