"""The addresses of tensors' memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def address_of(tensor: Tensor) -> int:
    """Return the address of the storage of which a tensor is a view, 0 if it has none of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    has_memory = plain and not tensor.is_meta and not tensor._is_zerotensor()
    return tensor.untyped_storage().data_ptr() if has_memory else 0
