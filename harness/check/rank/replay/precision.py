"""The precisions in which a recorded call is run again."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Precision(Enum):
    """In what a replay computes: everything in double precision, or as the training did."""

    FLOAT64 = "float64"
    NATIVE = "the precision of the training"


def double_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of double precision that stands for ``dtype``; integers and 8-bit formats stay as they are."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point and dtype.itemsize > 1 else dtype


def to_float64(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in double precision, without a graph."""
    return tensor.detach().to(dtype=double_of(tensor.dtype), copy=True)
