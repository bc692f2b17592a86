"""The mistakes that are known to happen to a gradient, each as a prediction. The specific come before the general."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from harness.core.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene
from harness.judge.noise import distance, norm
from harness.judge.oracle import clipped, mean_gradient


def _times(factor: float, gradient: Tensors) -> Tensors:
    return {name: value * factor for name, value in gradient.items()}


def _plus(left: Tensors, right: Tensors) -> Tensors:
    return {name: left[name] + right[name].double() if name in right else left[name] for name in left}


def _own_parts(scene: Scene) -> list[list[Tensors]]:
    return [[groups[scene.rank]] for groups in scene.truth.parts if scene.rank < len(groups)]


def _summed_over_ranks(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1:
        yield clipped(_times(scene.world, scene.truth.raw), scene.clip_norm)
        yield _times(scene.world, scene.truth.contract)


def _averaged_twice(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1:
        yield clipped(_times(1 / scene.world, scene.truth.raw), scene.clip_norm)
        yield _times(1 / scene.world, scene.truth.contract)


def _own_only(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1 and (own := _own_parts(scene)):
        yield clipped(mean_gradient(own), scene.clip_norm)


def _own_where_one_is_unused(scene: Scene) -> Iterable[Tensors]:
    if any(scene.trained - part.keys() for groups in scene.truth.parts for part in groups):
        yield from _own_only(scene)


def _some_tensors_own(scene: Scene) -> Iterable[Tensors]:
    """Take each tensor from the rank's own gradient where that is nearer than the average."""
    if scene.world > 1 and scene.clip_norm is None and (parts := _own_parts(scene)):
        own, right = mean_gradient(parts), scene.truth.contract
        given = scene.step.gradients
        local = {
            name
            for name in right
            if name in given and name in own and distance(given[name], own[name]) < distance(given[name], right[name])
        }
        if local and local != set(right):
            yield {name: own[name] if name in local else right[name] for name in right}


def _shares_of_whole(scene: Scene) -> Iterable[Tensors]:
    # The derivative of the whole loss through one rank's outputs, averaged over ranks: the 1/world-th part of it.
    if scene.world > 1:
        yield _times(1 / scene.world, scene.truth.whole)


def _not_divided_by_micro_batches(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1:
        yield clipped(_times(scene.micro_batches, scene.truth.raw), scene.clip_norm)


def _divided_twice(scene: Scene) -> Iterable[Tensors]:
    for count in {scene.micro_batches, scene.accumulate} - {1}:
        yield clipped(_times(1 / count, scene.truth.raw), scene.clip_norm)


def _short_window_divided_by_full_length(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches < scene.accumulate:
        yield clipped(_times(scene.micro_batches / scene.accumulate, scene.truth.raw), scene.clip_norm)


def _some_micro_batches(kept: Sequence[Sequence[Tensors]], scene: Scene) -> Iterable[Tensors]:
    share = mean_gradient(kept)
    yield clipped(_times(len(kept) / scene.micro_batches, share), scene.clip_norm)
    yield clipped(share, scene.clip_norm)


def _only_last_micro_batch(scene: Scene) -> Iterable[Tensors]:
    if scene.micro_batches > 1:
        yield from _some_micro_batches(scene.truth.parts[-1:], scene)


def _first_micro_batches_missing(scene: Scene) -> Iterable[Tensors]:
    for lost in range(1, scene.micro_batches):
        yield from _some_micro_batches(scene.truth.parts[lost:], scene)


def _last_micro_batches_missing(scene: Scene) -> Iterable[Tensors]:
    for kept in range(1, scene.micro_batches):
        yield from _some_micro_batches(scene.truth.parts[:kept], scene)


def _not_zeroed(scene: Scene) -> Iterable[Tensors]:
    if scene.earlier is not None:
        yield clipped(_plus(scene.truth.raw, scene.earlier), scene.clip_norm)


def _scale_left_in(scene: Scene) -> Iterable[Tensors]:
    if scene.step.scale not in (None, 1.0):
        yield clipped(_times(scene.step.scale, scene.truth.raw), scene.clip_norm)
    # Where the scaler was never asked to step, nobody took its scale down: any power of two is one.
    given, right = scene.step.gradients, scene.truth.raw
    ratios = [norm(given[name]) / norm(right[name]) for name in right if name in given and norm(right[name])]
    if ratios:
        power = torch.tensor(ratios).median().log2().round()
        if float(power) >= 6:
            yield _times(float(2**power), right)


def _not_clipped(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        yield scene.truth.raw


def _clipped_before_unscaling(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None and scene.step.scale:
        yield clipped(scene.truth.raw, scene.clip_norm / scene.step.scale)


def _clipped_before_averaging(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None and scene.world > 1 and len(scene.truth.parts) == 1:
        yield mean_gradient([[clipped(part, scene.clip_norm) for part in scene.truth.parts[0]]])


def _clipped_tensor_by_tensor(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        yield {
            name: value for n, v in scene.truth.raw.items() for name, value in clipped({n: v}, scene.clip_norm).items()
        }


def _clipped_by_value(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is not None:
        limit = scene.clip_norm
        yield {name: value.clamp(-limit, limit) for name, value in scene.truth.raw.items()}


def _absent(scene: Scene) -> Iterable[Tensors]:
    right, given = scene.truth.contract, scene.step.gradients
    if any(name not in given for name in right):
        yield {name: value for name, value in right.items() if name in given}


def _zero(scene: Scene) -> Iterable[Tensors]:
    if scene.step.gradients:
        yield {name: torch.zeros_like(value) for name, value in scene.truth.contract.items()}


def _weighted_shares(scene: Scene) -> Iterable[Tensors]:
    """Fit the weight of each share's gradient: a sum of the right shares, with the wrong weights."""
    parts = [part for groups in scene.truth.parts for part in groups]
    names = [name for name in scene.truth.raw if name in scene.step.gradients]
    if scene.clip_norm is not None or not names:
        return

    def flat(gradient: Tensors) -> torch.Tensor:
        return torch.cat(
            [gradient.get(name, torch.zeros_like(scene.truth.raw[name])).double().flatten() for name in names]
        )

    columns = torch.stack([flat(part) for part in parts], dim=1)
    # As many equations as entries: with as many shares as entries anything would fit.
    if columns.shape[0] < 4 * columns.shape[1]:
        return
    target = flat(scene.step.gradients)
    if not bool(torch.isfinite(target).all()):
        return
    weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0].tolist()
    total: Tensors = {}
    for weight, part in zip(weights, parts, strict=True):
        for name, value in part.items():
            total[name] = total.get(name, torch.zeros_like(value)) + weight * value
    yield total


MISTAKES: tuple[Explanation, ...] = (
    Explanation(
        "zero", "optimizer",
        "all zero", "they were zeroed, or the loss detached, before the optimizer stepped", _zero,
    ),
    Explanation(
        "parameter-not-in-optimizer", "optimizer",
        "right, but the optimizer was not handed all of them",
        "parameters are missing from its groups, or had no gradient when it stepped", _absent,
    ),
    Explanation(
        "summed-over-ranks", "averaging",
        "the sum over {world} ranks, not their mean",
        "the loss or the all-reduce is not divided by the world size", _summed_over_ranks,
    ),
    Explanation(
        "unused-parameter-stops-the-average", "unused-params",
        "those of rank {rank}'s own samples, in a step that leaves parameters unused",
        "a bucket waits for every parameter: pass find_unused_parameters=True", _own_where_one_is_unused,
    ),
    Explanation(
        "not-synchronised", "sync",
        "those of rank {rank}'s own samples",
        "they were never all-reduced: does the forward go through the DDP object, outside no_sync()?", _own_only,
    ),
    Explanation(
        "not-divided-by-micro-batches", "accumulation",
        "the sum over {micro_batches} micro-batches, not their mean",
        "the loss is not divided by the number of micro-batches", _not_divided_by_micro_batches,
    ),
    Explanation(
        "short-window-divided-by-full-length", "accumulation",
        "divided by the full window although this one has only {micro_batches} micro-batches",
        "the last window of an epoch is divided by accumulate, not by its own length",
        _short_window_divided_by_full_length,
    ),
    Explanation(
        "only-last-micro-batch", "accumulation",
        "those of the last of {micro_batches} micro-batches",
        "gradients are zeroed, or synchronised, for every micro-batch", _only_last_micro_batch,
    ),
    Explanation(
        "first-micro-batches-missing", "accumulation",
        "without the first of {micro_batches} micro-batches",
        "something wiped the gradients in the middle of the window: a validation, a zero_grad()",
        _first_micro_batches_missing,
    ),
    Explanation(
        "last-micro-batches-missing", "accumulation",
        "without the last of {micro_batches} micro-batches",
        "the optimizer stepped before the window was complete", _last_micro_batches_missing,
    ),
    Explanation(
        "divided-twice", "accumulation",
        "divided by the number of micro-batches twice",
        "both the trainer and the loss divide", _divided_twice,
    ),
    Explanation(
        "averaged-twice", "averaging",
        "divided by the world size of {world} twice",
        "DDP averages already", _averaged_twice,
    ),
    Explanation(
        "previous-step-not-zeroed", "accumulation",
        "this step's plus those of the step before",
        "zero_grad() is missing", _not_zeroed,
    ),
    Explanation(
        "loss-scale-left-in", "amp",
        "those of the scaled loss",
        "the optimizer stepped without unscaling: use scaler.step(optimizer)", _scale_left_in,
    ),
    Explanation(
        "clipped-before-unscaling", "clipping",
        "clipped while they were still multiplied by the loss scale of {scale}",
        "call scaler.unscale_(optimizer) before clipping", _clipped_before_unscaling,
    ),
    Explanation(
        "not-clipped", "clipping",
        "not clipped", "clipping is missing, or comes after the step", _not_clipped,
    ),
    Explanation(
        "clipped-before-averaging", "clipping",
        "the mean of gradients that each rank clipped by itself",
        "clip after the all-reduce", _clipped_before_averaging,
    ),
    Explanation(
        "clipped-tensor-by-tensor", "clipping",
        "clipped tensor by tensor", "the norm is that of all gradients together", _clipped_tensor_by_tensor,
    ),
    Explanation(
        "clipped-by-value", "clipping",
        "clipped entry by entry", "the norm is meant, not the value", _clipped_by_value,
    ),
    Explanation(
        "gathered-without-gradient", "batch-coupling",
        "the {world}th part of those of the whole batch's loss",
        "outputs were gathered without a gradient: the other ranks' share is missing", _shares_of_whole,
    ),
    Explanation(
        "some-parameters-not-synchronised", "unused-params",
        "averaged for some parameters and rank {rank}'s own for others",
        "a bucket was never reduced: does every parameter take part in every loss?", _some_tensors_own,
    ),
    Explanation(
        "shares-weighted-wrongly", "loss-normalisation",
        "made of the right shares with the wrong weights",
        "by what is the loss divided: samples, tokens, padding, ranks, micro-batches?", _weighted_shares,
    ),
)  # fmt: skip
