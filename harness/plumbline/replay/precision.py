"""The precisions in which a recorded call is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor


class ReplayPrecision(Enum):
    """The precision of a replay: everything in at least the named dtype, or as in the training."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    NATIVE = "the precision of the training"

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that replaces ``dtype``; integers and 8-bit formats stay unchanged."""
        if self is ReplayPrecision.NATIVE or dtype.itemsize == 1:
            return dtype
        if self is ReplayPrecision.FLOAT64:
            return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
        if dtype.is_complex:
            return torch.promote_types(dtype, torch.complex64)
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in this precision, without a graph."""
        return tensor.detach().to(dtype=self.wide(tensor.dtype), copy=True)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
