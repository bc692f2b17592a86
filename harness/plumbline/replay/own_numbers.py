"""Random numbers for the checks themselves: even inside of a replay, they do not count as the training's draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers on the CPU, drawn in ``dtype`` even inside of a replay in another precision."""
    with _disable_current_modes():
        return torch.randn(shape, generator=generator, dtype=dtype)


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal numbers of a tensor's shape, dtype and device."""
    return normal(tensor.shape, generator, tensor.dtype).to(tensor.device)
