"""Vectors of an optimizer's gradients, gathered where FSDP1 keeps them flat, and what is known of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import SEGMENT, BackwardPass, Parameter, as_real, length, segment
from plumbline.check.rank.local_gradients import ArrivedGradients, has_gradient_hooks
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.evidence.rank_file import dtype_name
from plumbline.recording.flat_sharding import FlatUnit, flat_units, part_of
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.parameters import ParameterNames, parameters_of
from plumbline.recording.sharding import reduction_dtypes, whole

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


Whole = dict[int, "Tensor | None"]
"""Whole gradients by the ids of parameters; None for a parameter without a gradient on any rank."""


class FlatGradients:
    """Determines which flat gradients are gathered before an optimizer's step.

    Ranks agree on this at the optimizer's first step, because a rank's optimizer can lack parameters.
    """

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._agreed: dict[int, tuple[int, list[int]]] = {}

    def units(self, optimizer: Optimizer) -> list[FlatUnit]:
        """Return the units in which some rank's optimizer has a parameter. All ranks have to call this."""
        every = [unit for root in self._names.roots for unit in flat_units(root)]
        every = list({id(unit.flat): unit for unit in every}.values())
        if not every:
            return []
        own = {id(part.unit.flat) for one in parameters_of(optimizer) if (part := part_of(one)) is not None}
        places = [index for index, unit in enumerate(every) if id(unit.flat) in own]
        known, agreed = self._agreed.get(id(optimizer), (0, []))
        if known != len(every) or not set(places) <= set(agreed):
            agreed = sorted(set(places) | _of_others(every, places))
            self._agreed[id(optimizer)] = len(every), agreed
        return [every[place] for place in agreed]


def gathered(units: Iterable[FlatUnit], of: Callable[[Tensor], Tensor | None]) -> Whole:
    """Return whole tensors. ``of`` returns what this rank has of one; see ``FlatUnit.gathered``."""
    found: Whole = {}
    for unit in units:
        found.update(zip(map(id, unit.parameters), unit.gathered(of), strict=True))
    return found


def _of_others(every: Sequence[FlatUnit], places: Sequence[int]) -> set[int]:
    """Return the places of the units in the optimizers of all ranks that share a sharded unit with this rank."""
    groups: dict[int, Any] = {id(unit.group): unit.group for unit in every if unit.is_sharded}
    found: set[int] = set()
    for group in groups.values():
        answers: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(answers, places, group=group)
        found.update(place for own in answers for place in own if every[place].group is group)
    return found


def recorded_parameters(
    optimizer: Optimizer, names: ParameterNames, sample: ParameterSample, *, accumulated: bool
) -> tuple[Parameter, ...]:
    reduced = reduction_dtypes(names.roots, accumulated=accumulated)

    def recorded(name: str, parameter: Tensor) -> Parameter:
        values, part = as_real(parameter), part_of(parameter)
        return Parameter(
            name,
            tuple(values.shape if part is None else part.shape),
            dtype_name(values.dtype),
            dtype_name(reduced.get(id(parameter))),
            sample.has(parameter),
            names.knows(parameter),
            parameter.requires_grad,
        )

    return tuple(map(recorded, names.of(optimizer), parameters_of(optimizer)))
