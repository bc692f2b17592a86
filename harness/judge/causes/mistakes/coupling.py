"""Samples that need each other saw others than they should, or sent no gradient back to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, scaled
from harness.judge.oracle.layout import Layout
from harness.judge.oracle.oracle import Oracle, clipped, mean_gradient

_BatchNorm = nn.modules.batchnorm._BatchNorm


def _shares_of_whole(scene: Scene) -> Iterable[Tensors]:
    # The derivative of the whole loss through one rank's outputs, averaged over ranks: the 1/world-th part of it.
    if scene.world > 1 and scene.laboratory.is_coupled(scene.index):
        yield scaled(1 / scene.world, scene.truth.whole)


def _times_world(scene: Scene) -> Iterable[Tensors]:
    if scene.world > 1 and scene.laboratory.is_coupled(scene.index):
        yield scaled(scene.world, scene.truth.whole)


def apart(layout: Layout) -> Layout:
    """Return the layout in which each device's share has a loss of its own."""
    return tuple(tuple((share,) for group in groups for share in group) for groups in layout)


def _each_device_alone(scene: Scene) -> Iterable[Tensors]:
    layout = scene.laboratory.layout(scene.index)
    if apart(layout) != layout:
        yield clipped(mean_gradient(scene.laboratory.parts(scene.index, apart(layout))), scene.clip_norm)


def _each_forward_alone(scene: Scene) -> Iterable[Tensors]:
    """Predict that each forward of the model had a loss of its own, although several make one batch."""
    groups = tuple(
        (forward,) for step in scene.ranks for micro in step.micro_batches for forward in micro.forwards if forward
    )
    if len(groups) > sum(map(len, scene.laboratory.layout(scene.index))):
        yield clipped(mean_gradient(scene.laboratory.parts(scene.index, (groups,))), scene.clip_norm)


def _coupled(predict: Any, wanted: bool) -> Any:
    """Return the same prediction, made only where samples need each other, or only where they do not."""

    def predict_if(scene: Scene) -> Iterable[Tensors]:
        if scene.laboratory.is_coupled(scene.index) == wanted:
            yield from predict(scene)

    return predict_if


def _in_evaluation(scene: Scene) -> Iterable[Tensors]:
    """Predict that some ranks, or all, are in evaluation mode."""
    with scene.laboratory.at(scene.index) as oracle:
        oracle.model.eval()
        resting = oracle.group_gradients(scene.laboratory.layout(scene.index))
    world = max(map(len, resting))
    for chosen in itertools.product((True, False), repeat=min(world, 4)):
        if any(chosen):
            yield clipped(
                mean_gradient(
                    [
                        [rest[g] if chosen[g % len(chosen)] else awake[g] for g in range(len(rest))]
                        for rest, awake in zip(resting, scene.truth.parts, strict=True)
                    ]
                ),
                scene.clip_norm,
            )


def _has_batchnorm(oracle: Oracle) -> bool:
    return any(isinstance(module, _BatchNorm) for module in oracle.model.modules())


def _evaluated(normalising: bool) -> Any:
    def predict(scene: Scene) -> Iterable[Tensors]:
        with scene.laboratory.at(scene.index) as oracle:
            applies = _has_batchnorm(oracle) == normalising
        if applies:
            yield from _in_evaluation(scene)

    return predict


class _LocalBackward(torch.autograd.Function):
    """Normalises with everybody's statistics, and goes back with each share's own."""

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
    """Normalise with everybody's statistics, taken as constants."""
    dims = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x.detach(), dims, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def _own_part(x: Tensor, eps: float, sizes: list[int]) -> Tensor:
    """Normalise with everybody's statistics; only a share's own part of them has a gradient."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    parts = torch.split(x, sizes)
    sums = [torch.stack([part.sum(dims, keepdim=True), part.square().sum(dims, keepdim=True)]) for part in parts]
    everybody = torch.stack(sums).sum(0).detach()
    out = []
    for part, own in zip(parts, sums, strict=True):
        mean, square = (everybody - own.detach() + own) / count
        out.append((part - mean) * (square - mean.square() + eps).rsqrt())
    return torch.cat(out)


@contextmanager
def _normalised_by(how: Any, oracle: Oracle, sizes: list[int]) -> Iterator[None]:
    """Let every BatchNorm of the oracle's model normalise in another way for a while."""
    layers: list[Any] = [module for module in oracle.model.modules() if isinstance(module, _BatchNorm)]

    def forward_of(layer: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            shape = [1, -1, *[1] * (x.dim() - 2)]
            normal: Tensor = how(x, layer.eps, sizes)
            return normal * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else normal

        return forward

    for layer in layers:
        layer.forward = forward_of(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _shared_statistics(scene: Scene) -> Iterable[Tensors]:
    """Predict statistics of all ranks on the way forward, and something else on the way back."""
    layout = scene.laboratory.layout(scene.index)
    if scene.world == 1 or len(layout) > 1:
        return
    sizes = [sum(map(len, group)) for group in layout[0]]
    everybody: Layout = (((tuple(i for group in layout[0] for share in group for i in share),),),)
    with scene.laboratory.at(scene.index) as oracle:
        if not _has_batchnorm(oracle):
            return
        for how in (_constants, _LocalBackward.apply, _own_part):
            with _normalised_by(how, oracle, sizes):
                yield clipped(mean_gradient(oracle.group_gradients(everybody)), scene.clip_norm)


def _coupled_otherwise(scene: Scene) -> Iterable[Tensors]:
    """Predict whatever is given, by elimination: all ranks agree, at every step, and samples need each other here."""
    if scene.evenly or not (scene.always_wrong and scene.ranks_agree and scene.laboratory.is_coupled(scene.index)):
        return
    with scene.laboratory.at(scene.index) as oracle:
        in_layers = _has_batchnorm(oracle)
    # Layers that couple samples wrongly have other outputs; a loss that does is still a loss of the right outputs.
    nearest = None if in_layers else scene.laboratory.of_some_loss(scene.index, scene.given)
    yield scene.given if nearest is None else nearest


EXPLANATIONS = (
    Explanation(
        "gathered-without-gradient", "batch-coupling",
        "the {world}th part of those of the whole batch's loss",
        "outputs were gathered without a gradient: the other ranks' share is missing", _shares_of_whole,
    ),
    Explanation(
        "gathered-gradient-summed", "batch-coupling",
        "{world} × those of the whole batch's loss",
        "every rank's loss over the gathered outputs sent its gradient back, and nobody divided", _times_world,
    ),
    Explanation(
        "statistics-shared-forward-only", "batch-coupling",
        "those of a BatchNorm that shares its statistics on the way forward and not on the way back",
        "the backward must combine the ranks' sums as the forward does", _shared_statistics,
    ),
    Explanation(
        "in-evaluation-mode", "batch-coupling",
        "those of a model in evaluation mode: running statistics in the place of the batch's",
        "call model.train() before training goes on, on every rank", _evaluated(True),
    ),
    Explanation(
        "in-evaluation-mode", "rng",
        "those of a model in evaluation mode: nothing is dropped",
        "call model.train() before training goes on, on every rank", _evaluated(False),
    ),
    Explanation(
        "each-device-alone", "batch-coupling",
        "the mean of losses that each device took of its own share",
        "outputs must be gathered before the loss", _coupled(_each_device_alone, True),
    ),
    Explanation(
        "each-forward-alone", "batch-coupling",
        "the mean of losses that each forward had of its own",
        "the batch was taken in parts, although its samples need each other", _coupled(_each_forward_alone, True),
    ),
    Explanation(
        "each-device-alone", "loss-normalisation",
        "the mean of losses that each device took of its own share",
        "shares are unequal: outputs must be gathered before the loss", _coupled(_each_device_alone, False),
    ),
    Explanation(
        "each-forward-alone", "loss-normalisation",
        "the mean of losses that each forward had of its own",
        "the batch was taken in unequal parts", _coupled(_each_forward_alone, False),
    ),
)  # fmt: skip

LAST = (
    Explanation(
        "coupled-otherwise", "batch-coupling",
        "no known combination of the samples' gradients, in a model or a loss in which samples need each other",
        "which samples did the loss, and the layers that use a batch's statistics, see together?", _coupled_otherwise,
    ),
)  # fmt: skip
