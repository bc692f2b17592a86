"""Digests, fingerprints and projections of tensors of any dtype, and their values if all lie on this rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from plumbline.evidence.projection import ROWS, fingerprint, fingerprints, row_weights, sketch
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.sharding import is_data_parallel_shard, is_shard, local

SMALL = 1024
"""Tensors with at most this many entries are hashed byte by byte: for many small tensors, calls would cost more than
memory traffic."""

_NUMBERS = 64
_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensor_digest(tensor: Tensor) -> str | None:
    """Return a digest of a tensor's values, on whatever device; None where they cannot be read (meta, a shard)."""
    values = readable_values(tensor)
    if values is None:
        return None
    if values.dtype in _DENSE and values.numel() > SMALL:
        return _hexadecimal(fingerprint(values))
    return _hashed(values)


def digest_and_projection(tensor: Tensor) -> tuple[str | None, list[float] | None]:
    """Return a tensor's digest, and a projection of it to ``ROWS`` numbers, float64.

    The projection is linear, and the same for all tensors of one shape. It is None where there is no finite one.
    """
    values = readable_values(tensor)
    if values is None or values.dtype not in _DENSE:
        return tensor_digest(tensor), None
    if values.numel() > SMALL:
        made = sketch(values, _NUMBERS)
        # Columns have random signs of their own, so that their sum is a projection as well.
        digest, projection = _hexadecimal(made.fingerprint), made.values.sum(0).view(ROWS, -1).sum(1)
    else:
        flat = values.reshape(-1).to("cpu", torch.float64)
        digest, projection = _hashed(values), row_weights(flat.device)[:, : flat.numel()] @ flat
    return digest, projection.tolist() if bool(projection.isfinite().all()) else None


def readable_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values where all of them lie on this rank, None where it is a shard or has no values."""
    if is_shard(tensor):
        return None
    values = local(tensor.detach())
    if values.is_meta or values.layout is not torch.strided or values.is_quantized:
        return None
    return torch.view_as_real(values) if values.is_complex() else values


def _hashed(values: Tensor) -> str:
    # + 0 turns -0.0 into 0.0, as for larger tensors: what is equal has equal bits.
    same = values + 0 if values.dtype in _DENSE else values
    raw = same.contiguous().cpu().reshape(-1).view(torch.uint8) if values.numel() else torch.empty(0)
    return hashlib.blake2b(tensor_bytes(raw), digest_size=8).hexdigest()


def _hexadecimal(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


_UNREADABLE = RuntimeError, NotImplementedError, TypeError


def weights_prints(parameters: Sequence[Tensor]) -> list[int]:
    """Return the fingerprints of this rank's parts of parameters; 0 if the bits of one are not accessible."""
    try:
        return fingerprints(list(map(_bits, parameters)))
    except _UNREADABLE:
        return list(map(_print, parameters))


def _print(parameter: Tensor) -> int:
    try:
        return fingerprints([_bits(parameter)])[0]
    except _UNREADABLE:
        return 0


def _bits(parameter: Tensor) -> Tensor:
    own = local(parameter.detach())
    own = torch.view_as_real(own) if own.is_complex() else own
    return own.view(torch.uint8) if own.element_size() == 1 else own


def written(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return what identifies the values of each parameter: a fingerprint, or the version if no values can be read.

    The version also changes if a script puts other weights in and then restores these, as for an evaluation. The memory
    of a shard that is gathered in place holds sometimes a part and sometimes all of the parameter.
    """
    readable = [one for one in parameters if not is_data_parallel_shard(one)]
    prints = dict(zip(map(id, readable), weights_prints(readable), strict=True))
    return [(0, found) if (found := prints.get(id(one), 0)) else (int(one._version), 0) for one in parameters]
