"""Gradients that are wrong on a stage of a pipeline, wrong exchanges between stages, or losses on the way back.

Gradients can be lost or scaled at a layer, or a bias is added too often.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import CONCLUSIVE, clip_factor, factor_between, scaled
from plumbline.judge.causes.held_parts import on_stages
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase, multiplied
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.oracle.noise import distance, length
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.truth import Combination


def _without_gradient(case: OracleGradientCase) -> Gradients:
    for rank in case.held.ranks if case.in_stages else ():
        for names in (case.held.on(rank), case.held.first_on(rank), case.held.only_on(rank)):
            if any(bool(case.observed[name].any()) for name in names & case.observed.keys()):
                continue
            rest = {n: torch.zeros_like(v) if n in names else v for n, v in case.expected.raw.items()}
            yield case.clipped(rest)
            yield {n: torch.zeros_like(v) if n in names else v for n, v in case.expected.contract.items()}


def _uses(case: OracleGradientCase, name: str) -> list[Tensor]:
    """Return a parameter's gradient through each single layer that uses it, in the model's order of layers."""
    with case.counterfactuals.at(case.index) as oracle:
        return [mean_gradient(oracle.group_gradients(case.layout))[name] for _ in oracle.used_by_one_layer(name)]


def _tied_not_added(case: OracleGradientCase) -> Gradients:
    """Predict that the gradient of a shared parameter includes only some of its uses, such as those on one rank."""
    for name in case.shared:
        uses = _uses(case, name)
        for kept in chain.from_iterable(combinations(uses, count) for count in range(1, len(uses))):
            yield case.clipped({**case.expected.raw, name: torch.stack(kept).sum(0)})


def _tied_scaled(case: OracleGradientCase) -> Gradients:
    for name, ranks in case.shared.items():
        for factor in (1 / len(ranks), len(ranks)):
            yield case.clipped({**case.expected.raw, name: case.expected.raw[name] * factor})


def _stages_scaled(case: OracleGradientCase) -> Gradients:
    """Predict one factor per stage; a stage's part of a shared gradient has the stage's factor."""
    factors = case.pattern.stages.factors
    if not case.in_stages or not case.pattern.stages.in_part or case.clip_norm is not None:
        return
    total = {n: v * factors.get(case.held.holders[n][0], 1.0) for n, v in case.expected.raw.items()}
    yield total
    for name, ranks in case.shared.items():
        uses = _uses(case, name)
        if len(uses) == len(ranks):
            parts = [use * factors.get(rank, 1.0) for use, rank in zip(uses, ranks, strict=True)]
            total = {**total, name: torch.stack(parts).sum(0)}
    yield total


def _stages_scaled_by_step(case: OracleGradientCase) -> Gradients:
    """Predict a factor for each stage that can differ from step to step, such as the length of a window."""
    if not case.in_stages or not case.pattern.stages.in_part or case.clip_norm is not None:
        return
    raw, total = case.expected.raw, dict(case.expected.raw)
    for rank in case.held.ranks:
        own = {name: raw[name] for name in case.held.first_on(rank) & raw.keys()}
        if sum(value.numel() for value in own.values()) >= CONCLUSIVE:
            total.update(scaled(factor_between(own, case.observed), own))
    yield total


def _divided_again(case: OracleGradientCase) -> Gradients:
    """Predict that the accumulated gradient is divided by a batch's number of micro-batches after each batch."""
    parts = case.batch_parts
    batches = case.micro_batches // parts
    for divided in (0, 1) if parts > 1 and batches > 1 else ():
        weight = Combination(lambda r, b, n: float(parts) ** -(batches - 1 - b // parts + divided))  # noqa: B023
        yield from case.predicted(weight)


def _clipped_stage_by_stage(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.in_stages:
        own = {rank: case.clipped(held) for rank, held in on_stages(case).items()}
        yield {name: own[case.held.holders[name][0]][name] for name in case.expected.raw}


def _norm_of_one_stage(case: OracleGradientCase) -> Gradients:
    for held in on_stages(case).values() if case.clip_norm is not None and case.in_stages else ():
        if size := length(held):
            yield scaled(clip_factor(case.clip_norm, size), case.expected.raw)


def _shared_counted_again(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None and case.shared:
        size = sum(length(held) ** 2 for held in on_stages(case).values()) ** 0.5
        yield scaled(clip_factor(case.clip_norm, size), case.expected.raw)


def _stage_not_clipped(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is None or not case.in_stages:
        return
    for rank in case.held.ranks:
        names = case.held.first_on(rank)
        yield {n: case.expected.raw[n] if n in names else v for n, v in case.expected.contract.items()}


def _stage_wrong(case: OracleGradientCase) -> Gradients:
    stages, analysis = case.pattern.stages, case.analysis
    if not case.in_stages or not stages.in_part or case.clip_norm is not None:
        return
    rest = {name: right for name, right in case.expected.contract.items() if name not in stages.wrong}
    noise = {name: analysis.noise.at(name, case.expected.units[name]) for name in rest}
    allowed = analysis.allowed(analysis.limit)
    if all(distance(case.observed[name], right) <= allowed * noise[name] for name, right in rest.items()):
        yield Match()


register(
    OracleGradientCase,
    GradientHypothesis("stage-without-gradient", "optimizer", _without_gradient,
        "right, but zero or absent for the parameters on {wrong_ranks} ({held}), so they are not updated",
        "check that the rank's optimizer has them, and that a backward reaches them before the step", 942),
    GradientHypothesis("tied-gradients-not-added", "sync", _tied_not_added,
        "right, but for {tied}, which several ranks hold, {tied_holder} stepped with only its own part",
        "add the parts of all ranks that hold it, on each of them, before the step",
        695),
    GradientHypothesis("tied-gradients-scaled", "averaging", _tied_scaled,
        "right, but those of {tied}, which several ranks hold, are {tied_factor} × the right ones",
        "add the ranks' parts once: do not average them, and do not add them twice", 694),
    GradientHypothesis("not-divided-by-micro-batches", "accumulation",
        multiplied(lambda case: [case.batch_parts] if case.batch_parts > 1 else []),
        "the sum over the {batch_parts} micro-batches of a batch, not their mean",
        "divide the loss by the number of micro-batches", 674),
    GradientHypothesis("divided-by-the-number-of-stages", "averaging",
        multiplied(lambda case: [1 / len(case.held.ranks)] if case.in_stages else []),
        "divided by the number of stages, {stages}",
        "do not average over stages: they are not replicas, and each gradient is computed once", 648),
    GradientHypothesis("multiplied-by-the-number-of-stages", "averaging",
        multiplied(lambda case: [len(case.held.ranks)] if case.in_stages else []),
        "multiplied by the number of stages, {stages}",
        "do not multiply: stages are not replicas, and nothing is averaged over them", 647),
    GradientHypothesis("divided-twice", "accumulation",
        multiplied(lambda case: [1 / case.batch_parts] if case.batch_parts > 1 else []),
        "divided twice by the {batch_parts} micro-batches of a batch",
        "divide only once: in the loss, in the schedule, or in the gradients", 646),
    GradientHypothesis("shared-parameter-counted-again", "clipping", _shared_counted_again,
        "clipped by a norm in which a parameter that several ranks hold counts once for each of them",
        "add a tied weight's norm on only one of the ranks that hold it", 558),
    GradientHypothesis("clipped-by-the-norm-of-one-stage", "clipping", _norm_of_one_stage,
        "clipped by the norm of {norm_rank}'s parameters only",
        "add the squared norms over all stages before taking the root", 556),
    GradientHypothesis("clipped-stage-by-stage", "clipping", _clipped_stage_by_stage,
        "clipped on each rank by the norm of its own parameters only",
        "add the squared norms over all stages before taking the root", 545),
    GradientHypothesis("stage-not-clipped", "clipping", _stage_not_clipped,
        "clipped, but not for the parameters on {wrong_ranks} ({held})",
        "multiply the gradients of every stage by the factor of the whole model", 543),
    GradientHypothesis("stage-scaled", "averaging", _stages_scaled,
        "{stage_factors} ({held}), and right on all other ranks",
        "check whether a backward counts twice there, or whether something scales what stages exchange", 338),
    GradientHypothesis("divided-again-with-every-batch", "accumulation", _divided_again,
        "divided again by the {batch_parts} micro-batches of a batch after each batch of the window",
        "scale the loss, or scale gradients once, after the last batch of the window", 643),
    GradientHypothesis("stage-scaled", "averaging", _stages_scaled_by_step,
        "{stage_factors} ({held}), which differs by step, and right on all other ranks",
        "check whether each stage divides once more what it receives, by the micro-batches or the length of a window",
        36),
    GradientHypothesis("stage-wrong", "sync", _stage_wrong,
        "wrong for the parameters on {wrong_ranks} ({held}), and right for all others",
        "check what this stage receives, and through which activations its backward goes", 35),
)  # fmt: skip


MOST_BIASES = 12
"""The largest number of biases for which pairs of biases are tried too."""


def _layers(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the layers with parameters, one by one and in pairs of the same type and with the same parent."""
    leaves = {
        name: layer for name, layer in model.named_modules() if name and any(True for _ in layer.parameters(False))
    }
    pairs = [
        (one, other)
        for one, other in combinations(leaves, 2)
        if one.rpartition(".")[0] == other.rpartition(".")[0] != "" and type(leaves[one]) is type(leaves[other])
    ]
    return [*((name,) for name in leaves), *pairs]


def _numbers_of_ranks(case: OracleGradientCase) -> list[int]:
    cell = case.analysis.cell
    mesh = cell.parallelism.mesh(cell.topology)
    return sorted({*mesh.shape, mesh.size} - {1})


def _with_gradient_scaled(case: OracleGradientCase, layers: Collection[str], factor: float) -> Tensors:
    """Return the step's gradient if the backward multiplies the gradient at some layers' outputs by ``factor``."""

    def scale(layer: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.detach() + factor * (output - output.detach())

    with case.counterfactuals.at(case.index) as oracle:
        handles = [oracle.model.get_submodule(name).register_forward_hook(scale) for name in layers]
        try:
            return mean_gradient(oracle.group_gradients(case.layout))
        finally:
            for handle in handles:
                handle.remove()


def _through(factors: Sequence[float] | None) -> Callable[[OracleGradientCase], Gradients]:
    """Return the prediction that the backward multiplies the gradient at a layer's outputs by one of these factors.

    Without factors, numbers of ranks and their inverses are tried.
    """

    def predict(case: OracleGradientCase) -> Gradients:
        sizes = _numbers_of_ranks(case)
        if case.clip_norm is not None or case.in_stages or not sizes:
            return
        tried = factors or [factor for size in sizes for factor in (1 / size, float(size))]
        found = case.counterfactuals.found_on_the_way
        model = case.analysis.oracle.model
        ways = [(layers, factor) for factor in tried for layers in _layers(model)]
        is_lost = factors is not None
        for way in [found[is_lost]] if is_lost in found else ways:
            prediction = _with_gradient_scaled(case, *way)
            if case.error(prediction) <= case.limit:
                found.setdefault(is_lost, way)
            yield from case.if_wrong(prediction)

    return predict


def _biases(case: OracleGradientCase) -> Iterator[tuple[str, ...]]:
    names = [name for name in case.expected.contract if name.rpartition(".")[2] == "bias"]
    yield from ((name,) for name in names)
    if 2 < len(names) <= MOST_BIASES:
        yield from combinations(names, 2)
    if len(names) > 1:
        yield tuple(names)


def _bias_again(case: OracleGradientCase) -> Gradients:
    """Predict that biases are added once for each rank that computes with the same samples."""
    cell, before = case.analysis.cell, case.ranks[0].before
    sizes = {len(case.recorded), *_numbers_of_ranks(case)} - {1} if cell.parallelism.divides_layers else set()
    for size in sorted(sizes):
        for names in _biases(case):
            with case.counterfactuals.at(case.index) as oracle:
                oracle.load({name: value * size if name in names else value for name, value in before.items()})
                made = mean_gradient(oracle.group_gradients(case.layout))
            yield from case.if_wrong(case.clipped(made))
            for name in names:  # each rank's share of the sum has its own gradient, and all are added
                made = {**made, name: made[name] * size}
            yield from case.if_wrong(case.clipped(made))


register(
    OracleGradientCase,
    GradientHypothesis("bias-added-on-every-rank", "sync", _bias_again,
        "those of a model in which a bias is added once for each rank",
        "add the bias of a layer that is divided by rows after the sum over ranks", 203),
    GradientHypothesis("lost-on-the-way-back", "sync", _through([0.0]),
        "those of a backward pass that loses the gradient at the output of a layer",
        "check for a collective without a backward, a detach() or a no_grad() after the layer", 32),
    GradientHypothesis("scaled-on-the-way-back", "sync", _through(None),
        "those of a backward pass that multiplies or divides the gradient at a layer's output by a number of ranks",
        "check whether a collective's backward should add, average or pass on the ranks' gradients", 31),
)  # fmt: skip
