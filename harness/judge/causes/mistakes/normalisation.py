"""Divided by the wrong count."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, fit, fit_weights, mean, scaled, weighted
from harness.judge.oracle.layout import samples
from harness.judge.oracle.oracle import clipped, mean_gradient
from harness.workloads import Columns


def _samples_not_divided(scene: Scene) -> Iterable[Tensors]:
    """Predict a factor that is a number of samples: of a rank's share, of all, of the loader's batch."""
    layout = scene.laboratory.layout(scene.index)
    counts = {sum(map(len, group)) for groups in layout for group in groups} | {len(samples(layout))}
    for count in counts - {1}:
        for factor in (count, 1 / count):
            yield clipped(scaled(factor, scene.truth.raw), scene.clip_norm)


def _short_batch(scene: Scene) -> Iterable[Tensors]:
    """Predict that each share's sum is divided by the size of a full one, however short the share is."""
    workload, cell = scene.laboratory.workload, scene.laboratory.cell
    layout = scene.laboratory.layout(scene.index)
    full = workload.global_batch_size(cell.topology.devices) / scene.world
    sizes = [[sum(map(len, group)) for group in groups] for groups in layout]
    if any(size < full for groups in sizes for size in groups):
        parts = [part for groups in scene.truth.parts for part in groups]
        weights = [size / full / len(groups) / len(sizes) for groups in sizes for size in groups]
        yield clipped(weighted(parts, weights, scene.truth.raw), scene.clip_norm)


def _constant(scene: Scene) -> Iterable[Tensors]:
    if scene.factor > 0:
        yield clipped(scaled(scene.factor, scene.truth.raw), scene.clip_norm)


def _shares_weighted(scene: Scene) -> Iterable[Tensors]:
    """Fit the weight of each share's gradient: a sum of the right shares, with the wrong weights."""
    if scene.clip_norm is None and not scene.evenly:
        parts = [part for groups in scene.truth.parts for part in groups]
        weights = fit_weights(parts, scene.given, list(scene.given))
        if weights is not None:
            yield weighted(parts, weights, scene.given)


def _some_samples(scene: Scene) -> Iterable[Tensors]:
    """Predict that only some samples had a gradient: those whose fitted weight is not nearly nothing."""
    if scene.clip_norm is not None:
        return
    each = scene.laboratory.each_sample(scene.index)
    weights = fit_weights(each, scene.given, list(scene.given))
    if weights is None:
        return
    half = max(weights) / 2
    kept = [part for part, weight in zip(each, weights, strict=True) if weight > half]
    if 0 < len(kept) < len(each):
        yield mean(kept)
        yield scaled(len(kept) / len(each), mean(kept))


def _samples_weighted(scene: Scene) -> Iterable[Tensors]:
    if scene.clip_norm is None and not scene.evenly:
        fitted = fit(scene.laboratory.each_sample(scene.index), scene.given, list(scene.given))
        if fitted is not None:
            yield fitted


def _another_loss(scene: Scene) -> Iterable[Tensors]:
    """Predict the gradient of whatever loss of the same outputs comes nearest, where not every gradient is one."""
    if scene.always_wrong and not scene.evenly and scene.ranks_agree and scene.clip_norm is None:
        nearest = scene.laboratory.of_some_loss(scene.index, scene.given)
        if nearest is not None:
            yield nearest


def _mask_ignored(scene: Scene) -> Iterable[Tensors]:
    """Predict that what a column of yes and no leaves out of the loss, as padding, counts like the rest."""
    laboratory = scene.laboratory
    with laboratory.at(scene.index) as oracle:
        masked = oracle.data
        for name, column in masked.columns.items():
            if column.dtype == torch.bool and not bool(column.all()):
                oracle.data = Columns({**masked.columns, name: torch.ones_like(column)})
                try:
                    parts = oracle.group_gradients(laboratory.layout(scene.index))
                finally:
                    oracle.data = masked
                yield clipped(mean_gradient(parts), scene.clip_norm)


def _mean_of_samples(scene: Scene) -> Iterable[Tensors]:
    """Predict the mean of each sample's own loss, where the loss of several is no mean over them."""
    if each := scene.laboratory.each_sample(scene.index):
        yield clipped(mean(each), scene.clip_norm)


COUNTS = (
    Explanation(
        "short-batch-divided-by-full-size", "loss-normalisation",
        "divided by the size of a full batch although this one is shorter",
        "divide by the samples that are there", _short_batch,
    ),
    Explanation(
        "number-of-samples-left-in", "loss-normalisation",
        "{factor} × the right ones: a number of samples",
        "the loss is summed over a batch, or divided by its size twice", _samples_not_divided,
    ),
    Explanation(
        "padding-counted-in", "loss-normalisation",
        "those of a loss over everything, also over what the data mask",
        "is the mask used, in the sum and in the divisor?", _mask_ignored,
    ),
    Explanation(
        "mean-over-samples", "loss-normalisation",
        "the mean of each sample's own loss",
        "are tokens averaged for each sample first, so that those of short samples weigh more?", _mean_of_samples,
    ),
)  # fmt: skip

CONSTANT = (
    Explanation(
        "scaled-by-a-constant", "loss-normalisation",
        "{factor} × the right ones at every step",
        "by what is the loss divided, and by what multiplied?", _constant,
    ),
)  # fmt: skip

FITTED = (
    Explanation(
        "some-samples-without-gradient", "data",
        "those of some of the samples only",
        "the loss was given fewer samples than the model, or some outputs were cut off", _some_samples,
    ),
    Explanation(
        "shares-weighted-wrongly", "loss-normalisation",
        "made of the right shares with the wrong weights",
        "by what is the loss divided: samples, tokens, padding, ranks, micro-batches?", _shares_weighted,
    ),
    Explanation(
        "samples-weighted-wrongly", "loss-normalisation",
        "made of the right samples with the wrong weights",
        "by what is each sample's loss divided: its own length, the batch's tokens, padding?", _samples_weighted,
    ),
)  # fmt: skip

LAST = (
    Explanation(
        "another-loss", "loss-normalisation",
        "those of another loss of the same outputs",
        "is it the workload's loss, with its mask, its targets and its reduction?", _another_loss,
    ),
)  # fmt: skip
