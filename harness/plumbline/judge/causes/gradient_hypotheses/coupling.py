"""Samples that depend on each other, in a layer or in the loss, but were computed together with the wrong samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.judge.causes.combinations import scaled
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.oracle.layout import Layout
from plumbline.judge.oracle.oracle import Oracle, mean_gradient

_BatchNorm = nn.modules.batchnorm._BatchNorm


def _shares_of_whole(case: OracleGradientCase) -> Gradients:
    # The derivative of the whole loss through one rank's outputs, averaged over ranks: 1/world of the right gradient.
    if case.world > 1 and case.counterfactuals.is_coupled(case.index):
        yield scaled(1 / case.world, case.expected.whole)


def _times_world(case: OracleGradientCase) -> Gradients:
    if case.world > 1 and case.counterfactuals.is_coupled(case.index):
        yield scaled(case.world, case.expected.whole)


def _each_share_alone(layout: Layout) -> Layout:
    return tuple(tuple((share,) for group in groups for share in group) for groups in layout)


def _each_device_alone(case: OracleGradientCase) -> Gradients:
    layout = case.layout
    if _each_share_alone(layout) != layout:
        yield case.clipped(mean_gradient(case.counterfactuals.parts(case.index, _each_share_alone(layout))))


def _each_forward_alone(case: OracleGradientCase) -> Gradients:
    groups = tuple(
        (forward,) for step in case.ranks for micro in step.micro_batches for forward in micro.forwards if forward
    )
    if len(groups) > sum(map(len, case.layout)):
        yield case.clipped(mean_gradient(case.counterfactuals.parts(case.index, (groups,))))


def _coupled(predict: Any, wanted: bool) -> Any:
    """Return the prediction, made only where samples depend on each other, or only where they do not."""

    def predict_if(case: OracleGradientCase) -> Gradients:
        if case.counterfactuals.is_coupled(case.index) == wanted:
            yield from predict(case)

    return predict_if


def _in_evaluation(case: OracleGradientCase) -> Gradients:
    with case.counterfactuals.at(case.index) as oracle:
        oracle.model.eval()
        evaluated = oracle.group_gradients(case.layout)
    world = max(map(len, evaluated))
    for chosen in itertools.product((True, False), repeat=min(world, 4)):
        if any(chosen):
            yield case.clipped(
                mean_gradient(
                    [
                        [eval_mode[g] if chosen[g % len(chosen)] else train_mode[g] for g in range(len(eval_mode))]
                        for eval_mode, train_mode in zip(evaluated, case.expected.parts, strict=True)
                    ]
                )
            )


def _has_batchnorm(oracle: Oracle) -> bool:
    return any(isinstance(module, _BatchNorm) for module in oracle.model.modules())


def _evaluated(normalising: bool) -> Any:
    def predict(case: OracleGradientCase) -> Gradients:
        with case.counterfactuals.at(case.index) as oracle:
            applies = _has_batchnorm(oracle) == normalising
        if applies:
            yield from _in_evaluation(case)

    return predict


class _LocalBackward(torch.autograd.Function):
    """Normalises with the statistics of all shares in the forward, and with each share's own in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, eps: float, sizes: list[int]) -> Tensor:
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        normal = (x - mean) * scale
        context.save_for_backward(normal, scale)
        context.dims, context.sizes = dims, sizes
        return normal

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        normal, scale = context.saved_tensors
        parts = [
            g - g.mean(context.dims, keepdim=True) - n * (g * n).mean(context.dims, keepdim=True)
            for g, n in zip(torch.split(gradients[0], context.sizes), torch.split(normal, context.sizes), strict=True)
        ]
        return torch.cat(parts) * scale, None, None


def _constants(x: Tensor, eps: float, sizes: list[int]) -> Tensor:
    """Normalise with the statistics of all shares, taken as constants."""
    dims = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x.detach(), dims, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def _own_part(x: Tensor, eps: float, sizes: list[int]) -> Tensor:
    """Normalise with the statistics of all shares; only a share's own part of them has a gradient."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    parts = torch.split(x, sizes)
    sums = [torch.stack([part.sum(dims, keepdim=True), part.square().sum(dims, keepdim=True)]) for part in parts]
    together = torch.stack(sums).sum(0).detach()
    out = []
    for part, own in zip(parts, sums, strict=True):
        mean, square = (together - own.detach() + own) / count
        out.append((part - mean) * (square - mean.square() + eps).rsqrt())
    return torch.cat(out)


class _UnevenSamples(Exception):  # noqa: N818 - it ends a prediction and is not an error
    """A BatchNorm got different numbers of rows from different samples, so shares cannot be told apart."""


@contextmanager
def _normalised_by(how: Any, oracle: Oracle, sizes: list[int]) -> Iterator[None]:
    layers: list[Any] = [module for module in oracle.model.modules() if isinstance(module, _BatchNorm)]

    def forward_of(layer: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            shape = [1, -1, *[1] * (x.dim() - 2)]
            # A sample may have several rows: one for each token.
            rows, rest = divmod(len(x), sum(sizes))
            if rest:
                raise _UnevenSamples
            normal: Tensor = how(x, layer.eps, [size * rows for size in sizes])
            return normal * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else normal

        return forward

    for layer in layers:
        layer.forward = forward_of(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _shared_statistics(case: OracleGradientCase) -> Gradients:
    layout = case.layout
    if case.world == 1 or len(layout) > 1:
        return
    sizes = [sum(map(len, group)) for group in layout[0]]
    whole_batch: Layout = (((tuple(i for group in layout[0] for share in group for i in share),),),)
    with case.counterfactuals.at(case.index) as oracle:
        if not _has_batchnorm(oracle):
            return
        for how in (_constants, _LocalBackward.apply, _own_part):
            with _normalised_by(how, oracle, sizes), suppress(_UnevenSamples):
                yield case.clipped(mean_gradient(oracle.group_gradients(whole_batch)))


def _coupled_otherwise(case: OracleGradientCase) -> Gradients:
    """Match by elimination if every step is wrong, ranks agree, and samples are coupled.

    If the mistake may be a loss of the right outputs, predict the gradient of the nearest loss instead.
    """
    if case.pattern.only_scaled or not (
        case.pattern.every_step and case.ranks_agree and case.counterfactuals.is_coupled(case.index)
    ):
        return
    with case.counterfactuals.at(case.index) as oracle:
        in_layers = _has_batchnorm(oracle)
    # Layers that couple samples wrongly have other outputs; a wrong loss is still a loss of the right outputs.
    nearest = None if in_layers else case.counterfactuals.nearest_loss_gradient(case.index, case.observed)
    yield Match() if nearest is None else nearest


register(
    OracleGradientCase,
    GradientHypothesis("gathered-without-gradient", "batch-coupling", _shares_of_whole,
        "1/{world} of those of the whole batch's loss",
        "gather outputs with their gradient: the other ranks' share is missing", 290),
    GradientHypothesis("gathered-gradient-summed", "batch-coupling", _times_world,
        "{world} × those of the whole batch's loss",
        "divide by the world size: every rank's loss over the gathered outputs sends its gradient back", 285),
    GradientHypothesis("statistics-shared-forward-only", "batch-coupling", _shared_statistics,
        "those of a BatchNorm that shares its statistics in the forward but not in the backward",
        "combine the ranks' sums in the backward as in the forward", 280),
    GradientHypothesis("in-evaluation-mode", "batch-coupling", _evaluated(True),
        "those of a model in evaluation mode: running statistics instead of the batch's",
        "call model.train() on every rank before training continues", 275),
    GradientHypothesis("in-evaluation-mode", "rng", _evaluated(False),
        "those of a model in evaluation mode: nothing is dropped",
        "call model.train() on every rank before training continues", 270),
    GradientHypothesis("each-device-alone", "batch-coupling", _coupled(_each_device_alone, True),
        "the mean of losses that each device computed from its own share",
        "gather outputs before the loss", 265),
    GradientHypothesis("each-forward-alone", "batch-coupling", _coupled(_each_forward_alone, True),
        "the mean of losses that were computed for each forward separately",
        "process the batch at once, because its samples depend on each other", 260),
    GradientHypothesis("each-device-alone", "loss-normalisation", _coupled(_each_device_alone, False),
        "the mean of losses that each device computed from its own share",
        "gather outputs before the loss, because shares are unequal", 255),
    GradientHypothesis("each-forward-alone", "loss-normalisation", _coupled(_each_forward_alone, False),
        "the mean of losses that were computed for each forward separately",
        "weight the parts of the batch by their size, because they are unequal", 250),
    GradientHypothesis("coupled-otherwise", "batch-coupling", _coupled_otherwise,
        "not a known combination of the samples' gradients, and samples depend on each other in the model or the loss",
        "check which samples the loss, and the layers that use a batch's statistics, see together", 20),
)  # fmt: skip
