"""The memory that tensors lie in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def address_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of, 0 where it has none of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    has_memory = plain and not tensor.is_meta and not tensor._is_zerotensor()
    return tensor.untyped_storage().data_ptr() if has_memory else 0
