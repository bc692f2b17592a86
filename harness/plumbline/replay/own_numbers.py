"""Random numbers that a check itself needs, within a replay too: they count as none of the training's own draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers on the CPU, drawn in ``dtype`` whatever a replay around this computes in."""
    with _disable_current_modes():
        return torch.randn(shape, generator=generator, dtype=dtype)


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of a tensor's shape, dtype and device."""
    return normal(tensor.shape, generator, tensor.dtype).to(tensor.device)
