"""Mistakes inside the model: gradients that are lost or scaled at a layer, or a bias that is added too often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from torch import nn

from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.oracle import clipped

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
    """Return the numbers of ranks along each dimension of the mesh, and in total."""
    cell = case.counterfactuals.cell
    mesh = cell.contract.mesh(cell.topology)
    return sorted({*mesh.shape, mesh.size} - {1})


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
        model = case.counterfactuals.analysis.oracle.model
        ways = [(layers, factor) for factor in tried for layers in _layers(model)]
        is_lost = factors is not None
        for way in [found[is_lost]] if is_lost in found else ways:
            prediction = case.counterfactuals.with_gradient_scaled(case.index, *way)
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
    cell = case.counterfactuals.cell
    sizes = {len(case.recorded), *_numbers_of_ranks(case)} - {1} if cell.contract.divides_layers else set()
    for size in sorted(sizes):
        for names in _biases(case):
            made = case.counterfactuals.with_weights_scaled(case.index, names, size)
            yield from case.if_wrong(clipped(made, case.clip_norm))
            for name in names:  # each rank's share of the sum has its own gradient, and all are added
                made = {**made, name: made[name] * size}
            yield from case.if_wrong(clipped(made, case.clip_norm))


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
