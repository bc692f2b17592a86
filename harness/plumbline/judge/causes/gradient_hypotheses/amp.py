"""Loss scale and precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.core.precision import PRECISIONS, Precision
from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import scaled, total_distance
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import Match, register
from plumbline.judge.oracle.noise import absolute_sum, distance, is_finite, length, limit, norm
from plumbline.judge.oracle.oracle import Oracle, mean_gradient

ROUGH = 10.0
"""Rounding to 16 bits makes errors larger than 1 / ROUGH of half a unit in the last place: their root mean square is
0.6 of it. This only decides how wrong gradients are named."""

NEAR = 4.0
"""A gradient with products in TF32 is this many times nearer to such a prediction than to the right one. This only
decides how a wrong gradient is named."""

FIRST_SCALE = 2.0**16
"""The initial scale of torch.amp.GradScaler."""


def _unknown_scale_left_in(case: OracleGradientCase) -> Gradients:
    """Predict a power of two: where scaler.step was never called, the scale was not recorded."""
    observed, right = case.step.gradients, case.expected.raw
    ratios = [norm(observed[name]) / norm(right[name]) for name in right if name in observed and norm(right[name])]
    if ratios and min(ratios) > 0 and all(math.isfinite(ratio) for ratio in ratios):
        power = float(torch.tensor(ratios).median().log2().round())
        if power >= 6:
            yield scaled(2**power, right)


def _unscaled_by_a_lowered_scale(case: OracleGradientCase) -> Gradients:
    optimizers = case.counterfactuals.parameters_of_optimizers()
    for order in (optimizers, optimizers[::-1]):
        factor, predicted = 1.0, {}
        for names in order:
            factor *= 2 if names & case.step.held_back.keys() else 1
            predicted.update({name: value * factor for name, value in case.expected.contract.items() if name in names})
        yield from case.if_wrong(predicted)


def _infinities_zeroed(case: OracleGradientCase) -> Gradients:
    workload, cell = case.analysis.workload, case.analysis.cell
    if not cell.arithmetic.scaled:
        return
    oracle = Oracle(workload, cell.topology.devices, cell.arithmetic)
    oracle.load(case.ranks[0].before)
    rough = oracle.group_gradients(case.layout, case.step.scale or FIRST_SCALE)
    every = mean_gradient(rough)
    if is_finite(every):
        return
    yield {name: torch.where(every[name].isfinite(), value, 0) for name, value in case.expected.contract.items()}
    # Or left out before the average: the shares that overflowed count as zero.
    finite = [
        [
            {name: torch.where(rough[m][g][name].isfinite(), value, 0) for name, value in part.items()}
            for g, part in enumerate(groups)
        ]
        for m, groups in enumerate(case.expected.parts)
    ]
    yield case.clipped(mean_gradient(finite))


def _rounded(case: OracleGradientCase) -> Gradients:
    """Predict the observed tensors whose entries are all 16-bit numbers, as near to right as those can be."""
    for dtype in (torch.bfloat16, torch.float16):
        # A rounding of each part, of the sums on the way, and of the quotient.
        near = (case.world + 2) * torch.finfo(dtype).eps
        rounded = {
            name: value.to(dtype).double()
            for name, value in case.observed.items()
            if torch.equal(value.to(dtype).double(), value)
            and distance(value, case.expected.contract[name]) <= near * _size(case, name)
        }
        if rounded:
            yield {**case.expected.contract, **rounded}


def _size(case: OracleGradientCase, name: str) -> float:
    parts = [part[name] for part in case.shares if name in part]
    return sum(map(norm, parts)) / len(parts)


def _rounded_on_the_way(case: OracleGradientCase) -> Gradients:
    """Match if each entry is as near to right as sums of 16-bit numbers are, and errors do not follow the gradient.

    Sums are rounded in an unknown order, so entries cannot be predicted. Of all errors, only rounding, of each part or
    of a partial sum, is small for small entries and independent of their sign.
    """
    right, raw = case.expected.contract, case.expected.raw
    count = len(case.shares)
    if count < 2 or not case.is_finite or not length(raw):
        return
    shortened = length(right) / length(raw)
    errors = {name: case.observed[name] - value for name, value in right.items()}
    sizes = {name: absolute_sum(part[name] / count for part in case.shares if name in part) for name in right}
    size, apart = length(sizes) * shortened, length(errors)
    along = abs(sum(float((errors[name] * value).sum()) for name, value in right.items()))
    for dtype in (torch.float16, torch.bfloat16):
        unit = torch.finfo(dtype).eps / 2
        bound = (count + 2) * unit * shortened
        near = all(
            bool((errors[name].abs() <= bound * sizes[name] + unit * 1e-3 * norm(sizes[name])).all()) for name in right
        )
        if near and apart > unit * size / ROUGH and along < apart * length(right) / 2:
            yield Match()


def _rounded_inputs(case: OracleGradientCase) -> Gradients:
    for name, column in case.analysis.oracle.data.columns.items():
        for dtype in (torch.bfloat16, torch.float16) if column.is_floating_point() else ():
            rounded = column.to(dtype).to(column.dtype)
            yield from case.if_wrong(case.clipped(case.counterfactuals.with_column(case.index, name, rounded)))


def _in_precision(case: OracleGradientCase, oracle: Oracle, scale: float = 1.0) -> Tensors:
    analysis = case.analysis
    analysis.load_step(oracle, analysis.steps[case.index])
    return oracle.gradient(case.layout, scale)


def _lower_precision(case: OracleGradientCase) -> Gradients:
    """Match if the error has a lower precision's size, and the gradient is nearer to that precision's than to right.

    Otherwise predict the lower precision's gradient. All devices round weights and activations in the same way, but add
    sums in different orders, so bits cannot be predicted. Random errors of the same size are further from the
    prediction than from the right gradient. If all entries are float32 numbers, the gradient was computed in float32.
    If only the loss was computed in float32, each entry can be predicted.
    """
    workload, cell = case.analysis.workload, case.analysis.cell
    devices = cell.topology.devices
    if cell.arithmetic.storage == "float64":
        # With several micro-batches, each loss is divided by their number either in float32 or later.
        oracle = Oracle(workload, devices, cell.arithmetic, torch.float32)
        for divisor in sorted({1, case.micro_batches}):
            yield _in_precision(case, oracle, 1 / divisor)
    right = case.expected.contract
    error = total_distance(case.observed, right)
    for precision in _below(cell.arithmetic):
        computed = _in_precision(case, Oracle(workload, devices, precision))
        usual = total_distance(computed, right)
        # ``usual`` is one draw: a trainer's error in this precision is larger or smaller by a small factor.
        alike = usual > 0 and usual / limit(12) <= error <= usual * limit(12)
        coarse = precision.autocast is None and all(
            torch.equal(value.float().double(), value) for value in case.observed.values()
        )
        yield Match() if alike and (coarse or total_distance(case.observed, computed) < error) else computed


_CUT = 23 - 10
"""The number of mantissa bits that float32 has in addition to TF32's."""


def _truncated(values: Tensor) -> Tensor:
    """Return ``values`` as the tensor cores read them: the bits beyond TF32's are cut off."""
    return _without_last_bits(values.float().view(torch.int32), values)


def _nearest(values: Tensor) -> Tensor:
    """Return ``values`` rounded to the nearest TF32 number."""
    return _without_last_bits(values.float().view(torch.int32) + (1 << (_CUT - 1)), values)


def _without_last_bits(bits: Tensor, values: Tensor) -> Tensor:
    return (bits >> _CUT << _CUT).view(torch.float32).to(values.dtype)


class _ProductsInTf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the factors of matrix products and convolutions, forward and backward; sums are not rounded.

    CUDA devices can use TF32 for float32 tensors:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded = rounded

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        factors = _FACTORS.get(func, ())
        given = [self._rounded(one) if index in factors else one for index, one in enumerate(args)]
        results = func(*given, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default:
            *others, bias = results
            return *others, bias if bias is None else func(*args, **(kwargs or {}))[-1]  # a sum, no product
        return results


_FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten.convolution_backward.default: (0, 1, 2),
}


def _products_in_tf32(case: OracleGradientCase) -> Gradients:
    """Match if the gradient is far nearer to one with products in TF32 than to the right one.

    A value that is nearly half-way between two TF32 numbers can be rounded to either, so bits cannot be predicted.
    """
    arithmetic = case.analysis.cell.arithmetic
    if arithmetic.storage != "float32" or arithmetic.autocast is not None:
        return
    error = total_distance(case.observed, case.expected.contract)
    for rounded in (_truncated, _nearest):
        with case.counterfactuals.at(case.index) as oracle, _ProductsInTf32(rounded):
            computed = oracle.gradient(case.layout)
        yield Match() if total_distance(case.observed, computed) < error / NEAR else computed


def _below(precision: Precision) -> Iterable[Precision]:
    if not precision.is_16_bit:
        if precision.storage == "float64":
            yield PRECISIONS["32"]
        yield Precision("16", storage=precision.storage, autocast="float16")
        yield PRECISIONS["bf16"]


register(
    OracleGradientCase,
    GradientHypothesis("infinities-zeroed", "amp", _infinities_zeroed,
        "right except for zeros where float16 overflows",
        "do not replace infinities: all ranks must skip a step that overflowed", 980),
    GradientHypothesis("loss-scale-left-in", "amp", _unknown_scale_left_in,
        "those of the scaled loss",
        "call scaler.step(optimizer), which unscales them", 970),
    GradientHypothesis("unscaled-by-a-lowered-scale", "amp", _unscaled_by_a_lowered_scale,
        "twice the right ones for an optimizer that steps after one whose gradient overflowed",
        "call scaler.update() once, after all optimizers: it lowered the scale between two of them", 968),
    GradientHypothesis("inputs-rounded", "amp", _rounded_inputs,
        "those of samples whose inputs or targets are rounded to 16 bits",
        "do not cast or store batches in 16 bits: autocast casts what it needs", 206),
    GradientHypothesis("rounded-to-16-bits", "amp", _rounded,
        "right to 16 bits, and every entry is a 16-bit number",
        "check whether the all-reduce compresses gradients to 16 bits", 65),
    GradientHypothesis("rounded-to-16-bits", "amp", _rounded_on_the_way,
        "right to 16 bits: each entry is off by the rounding of its parts or of their partial sums",
        "check whether the all-reduce, or the buffer in which gradients accumulate, adds in 16 bits", 62),
    GradientHypothesis("computed-in-tf32", "amp", _products_in_tf32,
        "those of products in TF32, which has 10 bits where float32 has 23",
        "set torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 to False", 61),
    GradientHypothesis("computed-in-lower-precision", "amp", _lower_precision,
        "as far from the right ones as those of a lower precision",
        "check for an autocast, a cast or TF32 that this precision does not ask for", 60),
)  # fmt: skip
