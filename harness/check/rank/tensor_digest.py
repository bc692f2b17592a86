"""Digests of tensors by their bits, for tensors of any dtype, and which of them are whole on this rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from harness.evidence.projection import fingerprint

_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensor_digest(tensor: Tensor) -> str | None:
    """Return a digest of a tensor's bits, on whatever device; None where they cannot be read (meta, sparse)."""
    local = whole(tensor)
    if local is None:
        return None
    if local.dtype in _DENSE:
        return f"{fingerprint(local) & (1 << 64) - 1:016x}"
    raw = local.contiguous().cpu().reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0)
    return hashlib.blake2b(bytes(raw.numpy()), digest_size=8).hexdigest()


def whole(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values where all of them lie on this rank, None where it is a shard or has no values."""
    values: Any = tensor.detach()
    placements = getattr(values, "placements", None)
    if placements is not None:
        if any(type(one).__name__ != "Replicate" for one in placements):
            return None
        values = values.to_local()
    sharded = hasattr(tensor, "_fsdp_flattened") or hasattr(tensor, "ds_id") or type(tensor).__name__ == "FlatParameter"
    if sharded or values.is_meta or values.layout is not torch.strided or values.is_quantized:
        return None
    return torch.view_as_real(values) if values.is_complex() else values
