"""The loss scale and the precision."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from harness.core.precision import PRECISIONS, Precision
from harness.evidence.trace import Tensors
from harness.judge.causes.explanation import Explanation, Scene, scaled, weighted
from harness.judge.oracle.noise import distance, limit, norm
from harness.judge.oracle.oracle import Oracle, clipped, mean_gradient

FIRST_SCALE = 2.0**16
"""What torch's GradScaler begins with."""


def _scale_left_in(scene: Scene) -> Iterable[Tensors]:
    if scene.step.scale not in (None, 1.0):
        yield clipped(scaled(scene.step.scale, scene.truth.raw), scene.clip_norm)
    # Where the scaler was never asked to step, nobody took its scale down: any power of two is one.
    given, right = scene.step.gradients, scene.truth.raw
    ratios = [norm(given[name]) / norm(right[name]) for name in right if name in given and norm(right[name])]
    if ratios and min(ratios) > 0 and all(math.isfinite(ratio) for ratio in ratios):
        power = float(torch.tensor(ratios).median().log2().round())
        if power >= 6:
            yield scaled(2**power, right)


def _unscaled_twice(scene: Scene) -> Iterable[Tensors]:
    if scene.step.scale not in (None, 1.0):
        yield clipped(scaled(1 / scene.step.scale, scene.truth.raw), scene.clip_norm)


def _scales_differ(scene: Scene) -> Iterable[Tensors]:
    """Predict the mean of gradients that each rank had scaled by its own scale, unscaled by this one's."""
    scales = [step.scale for step in scene.ranks]
    own = scales[scene.rank]
    if len(set(scales)) == 1 or own is None or scene.micro_batches > 1:
        return
    (parts,) = scene.truth.parts
    weights = [(scale or 1.0) / own / len(parts) for scale in scales]
    yield clipped(weighted(parts, weights, scene.truth.raw), scene.clip_norm)


def _infinities_zeroed(scene: Scene) -> Iterable[Tensors]:
    """Predict zeros where the scaled gradient of any share overflows in float16."""
    laboratory = scene.laboratory
    if not laboratory.cell.arithmetic.scaled:
        return
    oracle = Oracle(laboratory.workload, laboratory.cell.topology.devices, laboratory.cell.arithmetic)
    oracle.load(scene.ranks[0].before)
    rough = oracle.group_gradients(laboratory.layout(scene.index), scene.step.scale or FIRST_SCALE)
    every = mean_gradient(rough)
    if all(bool(value.isfinite().all()) for value in every.values()):
        return
    yield {name: torch.where(every[name].isfinite(), value, 0) for name, value in scene.truth.contract.items()}
    # Or left out before the average: the shares that overflowed count as zero.
    finite = [
        [
            {name: torch.where(rough[m][g][name].isfinite(), value, 0) for name, value in part.items()}
            for g, part in enumerate(groups)
        ]
        for m, groups in enumerate(scene.truth.parts)
    ]
    yield clipped(mean_gradient(finite), scene.clip_norm)


def _rounded(scene: Scene) -> Iterable[Tensors]:
    """Predict what is given where every entry of it is a 16-bit number, and as near to right as these are."""
    for dtype in (torch.bfloat16, torch.float16):
        # A rounding of each part, of the sums on the way, and of the quotient.
        near = (scene.world + 2) * torch.finfo(dtype).eps
        if all(
            torch.equal(value.to(dtype).double(), value)
            and distance(value, scene.truth.contract[name]) <= near * _size(scene, name)
            for name, value in scene.given.items()
        ):
            yield scene.given


def _size(scene: Scene, name: str) -> float:
    parts = [part[name] for groups in scene.truth.parts for part in groups if name in part]
    return sum(map(norm, parts)) / len(parts)


def _lower_precision(scene: Scene) -> Iterable[Tensors]:
    """Predict what is given where a lower precision's gradient is nearer to it than the right one; else that gradient.

    Rounding of the weights and the activations is the same whoever computes; the order of summation is not, so that a
    prediction of every bit is impossible. Random numbers as large as that error are further from the prediction than
    from what is right. A gradient that holds no more bits than float32 has shows it by itself.
    """
    storage = scene.laboratory.cell.arithmetic
    right = scene.truth.contract
    given = _far(scene.given, right)
    for precision in _below(storage):
        computed = scene.laboratory.in_precision(scene.index, precision)
        usual = _far(computed, right)
        # One draw: a right trainer's own error differs from it by a small factor either way.
        alike = usual > 0 and usual / limit(12) <= given <= usual * limit(12)
        coarse = precision.autocast is None and all(
            torch.equal(value.float().double(), value) for value in scene.given.values()
        )
        yield scene.given if alike and (coarse or _far(scene.given, computed) < given) else computed


def _far(left: Tensors, right: Tensors) -> float:
    return math.hypot(*(distance(left[name], right[name]) for name in right))


def _below(precision: Precision) -> Iterable[Precision]:
    if precision.autocast is None:
        if precision.storage == "float64":
            yield PRECISIONS["32"]
        yield Precision("16", storage=precision.storage, autocast="float16")
        yield PRECISIONS["bf16"]


SCALE = (
    Explanation(
        "infinities-zeroed", "amp",
        "right but for zeros where float16 overflows",
        "infinities were replaced: a step that overflowed must be skipped, by all ranks", _infinities_zeroed,
    ),
    Explanation(
        "unscaled-twice", "amp",
        "divided by the loss scale of {scale} twice",
        "both the trainer and the scaler unscale", _unscaled_twice,
    ),
    Explanation(
        "loss-scale-left-in", "amp",
        "those of the scaled loss",
        "the optimizer stepped without unscaling: use scaler.step(optimizer)", _scale_left_in,
    ),
    Explanation(
        "scales-differ", "amp",
        "the mean of gradients that each rank had scaled by another number",
        "the loss scale must be the same on all ranks", _scales_differ,
    ),
)  # fmt: skip

PRECISION = (
    Explanation(
        "rounded-to-16-bits", "amp",
        "right to 16 bits, and hold no more than 16 bits",
        "gradients were rounded, for the all-reduce perhaps", _rounded,
    ),
    Explanation(
        "computed-in-lower-precision", "amp",
        "as far from right as a lower precision is",
        "is there an autocast, a cast, or TF32, that this precision does not ask for?", _lower_precision,
    ),
)  # fmt: skip
