"""Vectors of an optimizer's gradients: as received, before and after clipping, and as left by backward passes."""

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
    """Return the segment of a gradient. A sharded gradient is gathered first."""
    return segment(_dense(gradient))


def exact_segment(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the segment of the exact gradient of a parameter of ``dtype``.

    It is compared with gradients that are rounded to the parameter's dtype. The projection's own rounding is negligible
    in comparison, unless this dtype is float64. No tolerance follows from exact gradients.
    """
    return segment(gradient, split=dtype in (torch.float64, torch.complex128))


def received(
    optimizer: Optimizer, parameter: Tensor, gradient: Tensor | None, *, sampled: bool = True
) -> tuple[Tensor, float]:
    """Return the segment and the norm of the gradient with which an optimizer steps; NaN and 0 without a gradient.

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
    """Return whether the script has hooks that can change a gradient before it arrives. One hook is the recorder's."""
    return len(parameter._backward_hooks or ()) > 1


def has_own_hooks(parameter: Tensor) -> bool:
    """Return whether the script has hooks on the parameter that can change its gradient."""
    return has_gradient_hooks(parameter) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def vector(one: ArrivedGradients, parameters: Sequence[Tensor], sample: ParameterSample) -> BackwardPass:
    """Return a pass as vectors for these parameters. Parameters outside the sample have no entries."""
    return joined(one, {id(p): _length(p) if sample.has(p) else 0 for p in parameters})


def joined(one: ArrivedGradients, lengths: Mapping[int, int]) -> BackwardPass:
    """Return a pass as vectors. ``lengths`` has the number of entries of each parameter, by its id."""
    zeros = {name: torch.zeros(length, dtype=torch.float64) for name, length in lengths.items()}
    local = torch.cat([one.local.get(name, zero) for name, zero in zeros.items()])
    if one.exact is None:
        return BackwardPass(one.number, local, None, one.scale, one.facts)
    # If a gradient arrived that no replay computed, there is no exact one.
    unknown = {name: zero if name not in one.local else zero + torch.nan for name, zero in zeros.items()}
    exact = torch.cat([one.exact.get(name, missing) for name, missing in unknown.items()])
    native = torch.cat([one.native.get(name, missing) for name, missing in unknown.items()]) if one.native else None
    return BackwardPass(one.number, local, exact, one.scale, one.facts, native)


def _dense(gradient: Tensor) -> Tensor:
    """Return the whole gradient as a dense real tensor. If it is sharded, all ranks have to call this."""
    gradient = whole(gradient)
    return as_real(gradient.to_dense() if gradient.is_sparse else gradient)


def _length(parameter: Tensor) -> int:
    part = part_of(parameter)
    return length(parameter) if part is None else min(part.shape.numel(), SEGMENT)
