"""Losses that are divided by the wrong count, or that weight samples wrongly."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import factor_between, fit, fit_weights, mean, scaled, weighted
from plumbline.judge.causes.gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.oracle.layout import samples
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _samples_not_divided(case: OracleGradientCase) -> Gradients:
    """Predict a factor that is a number of samples: of a rank's share, of all, of the loader's batch."""
    layout = case.counterfactuals.layout(case.index)
    counts = {sum(map(len, group)) for groups in layout for group in groups} | {len(samples(layout))}
    for count in counts - {1}:
        for factor in (count, 1 / count):
            yield clipped(scaled(factor, case.expected.raw), case.clip_norm)


def _short_batch(case: OracleGradientCase) -> Gradients:
    """Predict that each share's sum is divided by the size of a full share, also where the share is shorter."""
    workload, cell = case.counterfactuals.workload, case.counterfactuals.cell
    layout = case.counterfactuals.layout(case.index)
    full = workload.global_batch_size(cell.topology.devices) / case.world
    sizes = [[sum(map(len, group)) for group in groups] for groups in layout]
    if any(size < full for groups in sizes for size in groups):
        weights = [size / full / len(groups) / len(sizes) for groups in sizes for size in groups]
        yield clipped(weighted(case.shares, weights, case.expected.raw), case.clip_norm)


def _constant(case: OracleGradientCase) -> Gradients:
    if case.pattern.factor > 0:
        yield clipped(scaled(case.pattern.factor, case.expected.raw), case.clip_norm)


def _constant_at_some_steps(case: OracleGradientCase) -> Gradients:
    yield from _constant(case)
    yield case.expected.contract


def _shares_weighted(case: OracleGradientCase) -> Gradients:
    """Fit the weight of each share's gradient: a sum of the right shares, with the wrong weights."""
    if not case.pattern.only_scaled:
        fitted = fit(case.shares, case.observed, list(case.observed))
        if fitted is not None:
            yield fitted


def _some_samples(case: OracleGradientCase) -> Gradients:
    """Predict that only some samples had a gradient: those whose fitted weight is more than half of the largest."""
    if case.clip_norm is not None:
        return
    each = case.counterfactuals.each_sample(case.index)
    weights = fit_weights(each, case.observed, list(case.observed))
    if weights is None:
        return
    half = max(weights) / 2
    kept = [part for part, weight in zip(each, weights, strict=True) if weight > half]
    if 0 < len(kept) < len(each):
        yield mean(kept)
        yield scaled(len(kept) / len(each), mean(kept))


def _weighted_in_some_tensors(case: OracleGradientCase) -> Gradients:
    """Fit the weight of each rank's gradient to those tensors that are no multiple of the right ones."""
    analysis, raw, factor = case.counterfactuals.analysis, case.expected.raw, case.common_factor
    noise = {name: analysis.noise.at(name, unit) for name, unit in case.expected.units.items()}
    odd = [n for n in raw if distance(case.observed[n], factor * raw[n]) > analysis.limit * noise[n]]
    own_factors = {n: factor_between({n: raw[n]}, case.observed) for n in odd}
    if all(distance(case.observed[n], own_factors[n] * raw[n]) <= analysis.limit * noise[n] for n in odd):
        return  # no rank's part weighs more than another's
    ranks = [mean_gradient(own) for rank in range(case.world) if (own := case.own_parts(rank))]
    if 0 < len(odd) < len(raw) and len(ranks) > 1 and factor > 0:
        parts = [{name: part[name] for name in odd if name in part} for part in ranks]
        fitted = fit(parts, {name: case.observed[name] / factor for name in odd}, odd)
        if fitted is not None:
            yield clipped({**raw, **fitted}, case.clip_norm)


def _samples_weighted(case: OracleGradientCase) -> Gradients:
    if not case.pattern.only_scaled:
        fitted = fit(case.counterfactuals.each_sample(case.index), case.observed, list(case.observed))
        if fitted is not None:
            yield fitted


def _another_loss(case: OracleGradientCase) -> Gradients:
    """Predict the gradient of the nearest loss of the same outputs, where not every gradient could be one."""
    if case.pattern.every_step and not case.pattern.only_scaled and case.ranks_agree and case.clip_norm is None:
        nearest = case.counterfactuals.nearest_loss_gradient(case.index, case.observed)
        if nearest is not None:
            yield nearest


def _mask_ignored(case: OracleGradientCase) -> Gradients:
    """Predict that entries which a boolean column masks out of the loss, such as padding, are counted."""
    for name, column in case.counterfactuals.analysis.oracle.data.columns.items():
        if column.dtype == torch.bool and not bool(column.all()):
            counted = case.counterfactuals.with_column(case.index, name, torch.ones_like(column))
            yield clipped(counted, case.clip_norm)


def _mean_of_samples(case: OracleGradientCase) -> Gradients:
    """Predict the mean of each sample's own loss, where the loss of a batch is another mean."""
    if each := case.counterfactuals.each_sample(case.index):
        yield clipped(mean(each), case.clip_norm)


HYPOTHESES = (
    GradientHypothesis("short-batch-divided-by-full-size", "loss-normalisation", _short_batch,
        "divided by the size of a full batch although this one is shorter",
        "divide by the number of samples in the batch", 490),
    GradientHypothesis("number-of-samples-left-in", "loss-normalisation", _samples_not_divided,
        "{factor} × the right ones, which is a number of samples or one part of it",
        "the loss is summed over a batch, or divided by its size twice", 480),
    GradientHypothesis("padding-counted-in", "loss-normalisation", _mask_ignored,
        "those of a loss that includes the entries that the data mask out",
        "is the mask used, both in the sum and in the divisor?", 470),
    GradientHypothesis("mean-over-samples", "loss-normalisation", _mean_of_samples,
        "the mean of each sample's own loss",
        "are tokens averaged within each sample first, so that tokens of short samples weigh more?", 460),
    GradientHypothesis("scaled-by-a-constant", "loss-normalisation", _constant,
        "{factor} × the right ones at every step",
        "what is the loss divided by, and what is it multiplied by?", 70),
    GradientHypothesis("scaled-at-some-steps", "loss-normalisation", _constant_at_some_steps,
        "{factor} × the right ones, at some steps alone",
        "what is the loss of these steps divided by, and what is it multiplied by?", 68),
    GradientHypothesis("some-samples-without-gradient", "data", _some_samples,
        "those of some of the samples only",
        "the loss received fewer samples than the model, or some outputs were cut off", 50),
    GradientHypothesis("shares-weighted-wrongly", "loss-normalisation", _shares_weighted,
        "made of the right shares with the wrong weights",
        "what is the loss divided by: samples, tokens, padding, ranks, micro-batches?", 45),
    GradientHypothesis("some-tensors-weighted-wrongly", "averaging", _weighted_in_some_tensors,
        "right for some parameters, and for others made of the ranks' own with the wrong weights",
        "what does one rank multiply these parameters' gradients by before the all-reduce?", 43),
    GradientHypothesis("samples-weighted-wrongly", "loss-normalisation", _samples_weighted,
        "made of the right samples with the wrong weights",
        "what is each sample's loss divided by: its own length, the batch's tokens, padding?", 40),
    GradientHypothesis("another-loss", "loss-normalisation", _another_loss,
        "those of another loss of the same outputs",
        "is it the workload's loss, with its mask, its targets and its reduction?", 10),
)  # fmt: skip
