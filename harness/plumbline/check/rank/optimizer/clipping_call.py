"""One call of a function that clips or that returns a norm, with the norms of gradients before and after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts
from plumbline.recording.sharding import local


@dataclass(frozen=True, eq=False)
class Norm:
    """What torch.nn.utils.get_total_norm returned for gradients."""

    value: float
    norm_type: float
    gradients: Sequence[ref[Tensor]]

    def is_of(self, parameters: Iterable[Tensor], total_norm: Any) -> bool:
        """Return whether ``total_norm`` is this value, and this is the norm of exactly these parameters' gradients."""
        own = {id(one.grad) for one in parameters if one.grad is not None}
        return {id(one()) for one in self.gradients} == own and number(total_norm) == self.value


@dataclass(eq=False)
class ClippingCall:
    """One clipping call, with the norms of gradients before and after it, by the parameter's id.

    ``lasts``: the gradients were still clipped ones when the latest backward pass began.
    """

    kind: str
    limit: float
    norm_type: float
    returned: float | None
    given: bool
    at_pass: int
    inside: bool
    before: dict[int, float]
    after: dict[int, float]
    sharded: bool
    parameters: Sequence[Tensor]
    scales: dict[int, float]
    late: bool
    lasts: bool = False
    kept: bool = False


def facts_of(call: ClippingCall, own: set[int], optimizer: int) -> Facts:
    """Return the facts of a call for one optimizer."""
    before = {name: value for name, value in call.before.items() if name in own}
    after = {name: value for name, value in call.after.items() if name in own}
    norm = total(before)
    return {
        "kind": call.kind,
        "limit": call.limit,
        "norm_type": call.norm_type,
        "returned": call.returned,
        "given": call.given,
        "pass": call.at_pass,
        "inside": call.inside,
        "covered": len(before),
        "norm": norm,
        "others": total({name: value for name, value in call.before.items() if name not in own}),
        "factor": total(after) / norm if norm else 1.0,
        "scale": call.scales.get(optimizer, 1.0),
        "late": call.late,
        "kept": call.kept,
        "sharded": call.sharded,
    }


def lengths_of(parameters: Iterable[Tensor]) -> dict[int, float]:
    """Return the 2-norms of the existing gradients, computed in float64, by the parameter's id."""
    lengths = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = local(parameter.grad.detach())
            values = own.coalesce()._values() if own.is_sparse else own
            wide = torch.complex128 if values.is_complex() else torch.float64
            lengths[id(parameter)] = float(torch.linalg.vector_norm(values, dtype=wide).real)
    return lengths


def total(lengths: dict[int, float]) -> float:
    """Return the 2-norm of all gradients together."""
    return math.hypot(*lengths.values())


def number(value: Any) -> float | None:
    """Return a norm as a number; None if it is spread over ranks, so that reading it would communicate."""
    if isinstance(value, Tensor) and local(value) is value:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None
