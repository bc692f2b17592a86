"""Samples of module inputs and outputs at each position of a batch of sequences, to compare two runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.replay.nested import tensors_in
from plumbline.replay.own_numbers import normal

_NUMBERS = 4
"""Number of random projections that are kept of the values at each position."""

_VECTORS = 4
"""The most tensors of an argument list or an output that are sampled."""


class PositionSamples:
    """Takes samples (rows, positions, numbers). ``by_row``: a value for a whole row counts at each position of it."""

    def __init__(self, rows: int, length: int, *, by_row: bool = False) -> None:
        self._rows, self._length, self._by_row = rows, length, by_row

    def of(self, value: Any) -> Tensor | None:
        """Return projections of the tensors in a value that have a vector at each position, None if none has."""
        found = [at for one in vectors(value) if (at := self.at_positions(one.detach())) is not None]
        samples = [torch.matmul(at.double(), _directions(at.shape[-1], at.device)) for at in found[:_VECTORS]]
        return torch.cat(samples, -1) if samples else None

    def at_positions(self, one: Tensor) -> Tensor | None:
        """Return the vectors (rows, positions, size) of a tensor with one at each position, None for other tensors."""
        rows, length = self._rows, self._length
        if length in one.shape[2:] or not one.numel():
            return None  # attention weights, or another order of dimensions: no vectors at positions
        if one.dim() > 2 and tuple(one.shape[:2]) == (rows, length):
            return one.reshape(rows, length, -1)
        if one.dim() > 2 and tuple(one.shape[:2]) == (length, rows):
            return one.movedim(0, 1).reshape(rows, length, -1)
        if one.dim() == 2 and len(one) == rows * length:
            return one.reshape(rows, length, -1)
        if self._by_row and one.dim() == 2 and len(one) == rows:
            return one[:, None].repeat(1, length, 1)
        return None


def vectors(value: Any) -> Iterator[Tensor]:
    """Yield the plain floating-point tensors in a value."""
    return (one for one in tensors_in(value) if type(one) in (Tensor, nn.Parameter) and one.is_floating_point())


def distances(one: Tensor | None, other: Tensor | None, where: Tensor) -> Tensor | None:
    """Return the distance of samples at each position of ``where``, relative to their size over all of these."""
    if one is None or other is None or one.shape != other.shape:
        return None
    size = torch.linalg.vector_norm(one[where]) / max(1, int(where.sum())) ** 0.5
    apart = torch.where(where, torch.linalg.vector_norm(one - other, dim=-1), 0.0)
    found: Tensor = apart / size.clamp(min=torch.finfo(torch.float64).tiny)
    return found


def move(one: Tensor | None, other: Tensor | None, where: Tensor, limit: float) -> bool | None:
    """Return whether samples differ by more than a limit anywhere in ``where``, None if they cannot be compared."""
    apart = distances(one, other, where)
    return None if apart is None else bool((apart > limit).any())


def _directions(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return normal((size, _NUMBERS), generator).to(device)
