"""Shares, micro-batches or samples that are complete, but divided, weighted or combined wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import factor_between, fit, fit_weights, mean, scaled, weighted
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase, multiplied
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.layout import samples
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import mean_gradient


def _numbers_of_samples(case: OracleGradientCase) -> Iterator[float]:
    layout = case.layout
    counts = {sum(map(len, group)) for groups in layout for group in groups} | {len(samples(layout))}
    for count in counts - {1}:
        yield from (count, 1 / count)


def _short_batch(case: OracleGradientCase) -> Gradients:
    workload, cell = case.analysis.workload, case.analysis.cell
    layout = case.layout
    full = workload.global_batch_size(cell.topology.devices) / case.world
    sizes = [[sum(map(len, group)) for group in groups] for groups in layout]
    if any(size < full for groups in sizes for size in groups):
        weights = [size / full / len(groups) / len(sizes) for groups in sizes for size in groups]
        yield case.clipped(weighted(case.shares, weights, case.expected.raw))


_constant = multiplied(lambda case: [case.pattern.factor] if case.pattern.factor > 0 else [])


def _factor_of_ranks(case: OracleGradientCase) -> list[float]:
    return [case.pattern.factor] if case.world > 1 and case.micro_batches == 1 == case.accumulate else []


def _constant_at_some_steps(case: OracleGradientCase) -> Gradients:
    yield from _constant(case)
    yield case.expected.contract


def _weighted_otherwise(
    parts_of: Callable[[OracleGradientCase], Sequence[Tensors]],
) -> Callable[[OracleGradientCase], Gradients]:
    def predict(case: OracleGradientCase) -> Gradients:
        if not case.pattern.only_scaled:
            fitted = fit(parts_of(case), case.observed, list(case.observed))
            if fitted is not None:
                yield fitted

    return predict


def _some_samples(case: OracleGradientCase) -> Gradients:
    """Predict that only some samples had a gradient: those with more than half of the largest fitted weight."""
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
    """Fit the weight of each rank's gradient to the tensors that are not a multiple of the right ones."""
    analysis, raw, factor = case.analysis, case.expected.raw, case.common_factor
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
            yield case.clipped({**raw, **fitted})


def _another_loss(case: OracleGradientCase) -> Gradients:
    """Predict the gradient of the nearest loss of the same outputs, unless every gradient is that of some loss."""
    if case.pattern.every_step and not case.pattern.only_scaled and case.ranks_agree and case.clip_norm is None:
        nearest = case.counterfactuals.nearest_loss_gradient(case.index, case.observed)
        if nearest is not None:
            yield nearest


def _mask_ignored(case: OracleGradientCase) -> Gradients:
    for name, column in case.analysis.oracle.data.columns.items():
        if column.dtype == torch.bool and not bool(column.all()):
            counted = case.counterfactuals.with_column(case.index, name, torch.ones_like(column))
            yield case.clipped(counted)


def _mean_of_samples(case: OracleGradientCase) -> Gradients:
    if each := case.counterfactuals.each_sample(case.index):
        yield case.clipped(mean(each))


def _several_micro_batches(case: OracleGradientCase) -> list[Tensors]:
    return [mean(groups) for groups in case.expected.parts] if case.micro_batches > 1 else []


def _extremes(case: OracleGradientCase) -> Gradients:
    if case.world == 1 or case.micro_batches > 1 or case.clip_norm is not None:
        return
    (parts,) = case.expected.parts
    for reduce in (torch.amax, torch.amin, lambda stack, dim: stack.median(dim).values):
        yield {
            name: reduce(torch.stack([part.get(name, torch.zeros_like(value)) for part in parts]), 0)
            for name, value in case.expected.raw.items()
        }


register(
    OracleGradientCase,
    GradientHypothesis("scaled-by-a-constant", "accumulation",
        multiplied(lambda case: [case.pattern.factor] if case.accumulate > 1 else []),
        "{factor} × the right ones at every step",
        "check what the loss of a micro-batch is divided by", 80),
    GradientHypothesis("micro-batches-weighed-wrongly", "accumulation", _weighted_otherwise(_several_micro_batches),
        "a sum of the right {micro_batches} micro-batches with the wrong weights",
        "check what the loss of each micro-batch is divided by", 55),
    GradientHypothesis("reduced-by-an-extreme", "averaging", _extremes,
        "the largest, smallest or middle entries of all ranks, not their mean",
        "use a sum in the all-reduce, and divide by the number of ranks", 345),
    GradientHypothesis("some-tensors-multiplied", "averaging",
        lambda case: case.with_nearer(scaled(case.pattern.odd_factor, case.expected.raw)),
        "right for some parameters and {odd_factor} × the right ones for others",
        "check what scales the gradients of these parameters only: a hook, a group or a reduction", 94),
    GradientHypothesis("scaled-by-a-constant", "averaging", multiplied(_factor_of_ranks),
        "{factor} × the right ones at every step",
        "check what the loss and the all-reduce are multiplied and divided by", 75),
    GradientHypothesis("short-batch-divided-by-full-size", "loss-normalisation", _short_batch,
        "divided by the size of a full batch although this one is shorter",
        "divide by the number of samples in the batch", 490),
    GradientHypothesis("number-of-samples-left-in", "loss-normalisation", multiplied(_numbers_of_samples),
        "{factor} × the right ones, and this is a number of samples or its inverse",
        "divide the loss by the size of the batch once", 480),
    GradientHypothesis("padding-counted-in", "loss-normalisation", _mask_ignored,
        "those of a loss that includes the entries that the data masks out",
        "apply the mask both to the sum and to the divisor", 470),
    GradientHypothesis("mean-over-samples", "loss-normalisation", _mean_of_samples,
        "the mean of each sample's own loss",
        "average over all tokens: a mean within each sample gives tokens of short samples more weight", 460),
    GradientHypothesis("scaled-by-a-constant", "loss-normalisation", _constant,
        "{factor} × the right ones at every step",
        "check what the loss is multiplied and divided by", 70),
    GradientHypothesis("scaled-at-some-steps", "loss-normalisation", _constant_at_some_steps,
        "{factor} × the right ones, at some steps only",
        "check what the loss of these steps is multiplied and divided by", 68),
    GradientHypothesis("some-samples-without-gradient", "data", _some_samples,
        "those of some of the samples only",
        "pass all of the model's outputs to the loss, and do not cut any off", 50),
    GradientHypothesis("shares-weighted-wrongly", "loss-normalisation", _weighted_otherwise(lambda case: case.shares),
        "a sum of the right shares with the wrong weights",
        "check what the loss is divided by: samples, tokens, padding, ranks or micro-batches", 45),
    GradientHypothesis("some-tensors-weighted-wrongly", "averaging", _weighted_in_some_tensors,
        "right for some parameters, and for others a sum of the ranks' own with the wrong weights",
        "check what each rank multiplies these parameters' gradients by before the all-reduce", 43),
    GradientHypothesis("samples-weighted-wrongly", "loss-normalisation",
        _weighted_otherwise(lambda case: case.counterfactuals.each_sample(case.index)),
        "a sum of the right samples' gradients with the wrong weights",
        "check what each sample's loss is divided by: its own length, the batch's tokens or padding", 40),
    GradientHypothesis("another-loss", "loss-normalisation", _another_loss,
        "those of a different loss of the same outputs",
        "use the workload's loss, with its mask, its targets and its reduction", 10),
)  # fmt: skip
