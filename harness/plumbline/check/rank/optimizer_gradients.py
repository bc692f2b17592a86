"""The gradients of one optimizer as vectors: what it receives, before and after clipping, and what passes leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import SEGMENT, BackwardPass, as_real, length, segment
from plumbline.check.rank.local_gradients import ArrivedGradients
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.recording.flat_sharding import part_of
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.sharding import whole

_EMPTY = torch.zeros(0, dtype=torch.float64)


def kept(gradient: Tensor) -> Tensor:
    """Return the segment of a gradient, of the whole one if it is sharded."""
    return segment(_dense(gradient))


def exact_segment(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the segment of an exact gradient of a parameter of ``dtype``, to which local ones are compared.

    It is compared with gradients that are rounded to the parameter's dtype, beside which the projection's rounding is
    nothing, except where that is float64 as well. No tolerance follows from exact gradients.
    """
    return segment(gradient, split=dtype in (torch.float64, torch.complex128))


def received(
    optimizer: Optimizer, parameter: Tensor, gradient: Tensor | None, *, sampled: bool = True
) -> tuple[Tensor, float]:
    """Return the segment and the norm of the gradient with which an optimizer steps, NaN and 0 where there is none.

    The segment of a parameter that is not ``sampled`` is empty.
    """
    if gradient is None and not sampled:
        return _EMPTY, 0.0
    if gradient is None:
        return torch.full((_length(parameter),), torch.nan, dtype=torch.float64), 0.0
    scale = scale_left(optimizer)
    gradient = _dense(gradient)
    own = segment(gradient) if sampled else _EMPTY
    return own / scale, float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / scale


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether the script has hooks that may change a gradient before it arrives; one of them is ours."""
    return len(parameter._backward_hooks or ()) > 1


def has_own_hooks(parameter: Tensor) -> bool:
    """Return whether the script has hooks on the parameter that may change its gradient."""
    return has_gradient_hooks(parameter) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def vector(one: ArrivedGradients, parameters: Sequence[Tensor], sample: ParameterSample) -> BackwardPass:
    """Return a pass as far as it concerns parameters, as vectors, with nothing of those that are not in the sample."""
    return joined(one, {id(p): _length(p) if sample.has(p) else 0 for p in parameters})


def joined(one: ArrivedGradients, lengths: Mapping[int, int]) -> BackwardPass:
    """Return a pass as vectors of what is kept of parameters, whose ids have these ``lengths``."""
    zeros = {name: torch.zeros(length, dtype=torch.float64) for name, length in lengths.items()}
    local = torch.cat([one.local.get(name, zero) for name, zero in zeros.items()])
    if one.exact is None:
        return BackwardPass(one.number, local, None, one.scale, one.facts)
    # Where something arrived of which no replay knows, there is no exact gradient.
    unknown = {name: zero if name not in one.local else zero + torch.nan for name, zero in zeros.items()}
    exact = torch.cat([one.exact.get(name, missing) for name, missing in unknown.items()])
    native = torch.cat([one.native.get(name, missing) for name, missing in unknown.items()]) if one.native else None
    return BackwardPass(one.number, local, exact, one.scale, one.facts, native)


def _dense(gradient: Tensor) -> Tensor:
    """Return the whole of a gradient, which all ranks have to ask for where it is sharded, as a dense real tensor."""
    gradient = whole(gradient)
    return as_real(gradient.to_dense() if gradient.is_sparse else gradient)


def _length(parameter: Tensor) -> int:
    part = part_of(parameter)
    return length(parameter) if part is None else min(part.shape.numel(), SEGMENT)
