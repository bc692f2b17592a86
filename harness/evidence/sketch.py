"""What is kept of a tensor that is too large to be recorded whole.

The tensor inside is torch's. It is only carried here, so this file needs torch for its annotations alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SKETCH_ABOVE = 2**16
"""Tensors of weights and gradients with more entries than this are sketched, unless a launch says otherwise."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """A linear sketch of one tensor: the sketch of a difference is the difference of the sketches.

    ``values`` are a seeded random projection, float64, on the cpu, as long on average as the tensor is: one row, and
    for a float64 tensor two that are meant to be added up, of the leading and of the trailing bits. ``norm`` is the
    tensor's 2-norm, not finite where an entry is not. ``fingerprint`` is a hash of the bits: tensors of one shape and
    dtype that are equal have the same one, others another. ``dtype`` is torch's name, ``float32``.
    """

    values: Tensor
    norm: float
    fingerprint: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        """How many numbers the projection has."""
        return self.values.shape[1]

    @property
    def identity(self) -> tuple[int, tuple[int, ...], str]:
        """What two sketches have in common exactly where their tensors are equal."""
        return self.fingerprint, self.shape, self.dtype
