"""Digests, fingerprints and projections of tensors of any dtype, and their values if all lie on this rank."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plumbline.evidence.projection import ROWS, fingerprints, project, row_weights
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.sharding import is_data_parallel_shard, is_shard, local

SMALL = 1024
"""Tensors with at most this many entries are hashed byte by byte: for them, torch's operations would cost more than
copying the bytes. At most ``projection.CHUNK``."""

_NUMBERS = 64
_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensor_digest(tensor: Tensor) -> str | None:
    """Return a digest of a tensor's values, on any device; None where they cannot be read (meta, a shard)."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[str | None]:
    """Return the digest of each tensor. Digesting them together takes far fewer operations than one by one."""
    readable = [(one, readable_values(one)) for one in tensors]
    large = [one for one, values in readable if values is not None and _is_large(values)]
    prints = dict(zip(map(id, large), weights_prints(large), strict=True))
    return [
        (_hexadecimal(prints[id(one)]) if id(one) in prints else None if values is None else _hashed(values))
        for one, values in readable
    ]


def digest_and_projection(tensor: Tensor) -> tuple[str | None, list[float] | None]:
    """Return a tensor's digest and its projection."""
    return tensor_digest(tensor), projection(tensor)


def projection(tensor: Tensor) -> list[float] | None:
    """Return a projection to ``ROWS`` float64 numbers, which is the same linear map for all tensors of one shape.

    It is None if the tensor cannot be read, or the projection is not finite.
    """
    values = readable_values(tensor)
    if values is None or values.dtype not in _DENSE:
        return None
    if _is_large(values):
        # Columns have random signs of their own, so that their sum is a projection as well.
        made = project(values, _NUMBERS).sum(0).view(ROWS, -1).sum(1)
    else:
        flat = values.reshape(-1).to("cpu", torch.float64)
        made = row_weights(flat.device)[:, : flat.numel()] @ flat
    return made.tolist() if bool(made.isfinite().all()) else None


def sampled(values: Tensor, most: int) -> Tensor:
    """Return at most ``most`` entries of a tensor, evenly spaced; all of it if a sample would cost as much."""
    if values.numel() <= most or not values.is_contiguous():
        return values
    stride = -(-values.numel() // most) | 1  # an odd one does not stay in one column of many
    return values.view(-1)[::stride]


def readable_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values where all of them lie on this rank, None where it is a shard or has no values."""
    if is_shard(tensor):
        return None
    values = local(tensor.detach())
    if values.is_meta or values.layout is not torch.strided or values.is_quantized:
        return None
    return torch.view_as_real(values) if values.is_complex() else values


def _hexadecimal(number: int) -> str | None:
    return f"{number & (1 << 64) - 1:016x}" if number else None


def _is_large(values: Tensor) -> bool:
    return values.dtype in _DENSE and values.numel() > SMALL


def _hashed(values: Tensor) -> str:
    # + 0 turns -0.0 into 0.0, as for larger tensors: what is equal has equal bits.
    same = values + 0 if values.dtype in _DENSE else values
    raw = same.contiguous().cpu().reshape(-1).view(torch.uint8) if values.numel() else torch.empty(0)
    return hashlib.blake2b(tensor_bytes(raw), digest_size=8).hexdigest()


class _Moment(threading.local):
    """Fingerprints that this thread has computed while no tensor could change: by id, with the tensor itself."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, int]] | None = None


_MOMENT = _Moment()


@contextmanager
def unchanged() -> Iterator[None]:
    """A context in which the caller promises that no tensor changes: each fingerprint is computed only once."""
    before, _MOMENT.known = _MOMENT.known, {}
    try:
        yield
    finally:
        _MOMENT.known = before


_UNREADABLE = RuntimeError, NotImplementedError, TypeError


def weights_prints(parameters: Sequence[Tensor]) -> list[int]:
    """Return the fingerprints of this rank's parts of parameters; 0 for a part whose memory cannot be read."""
    known = {} if _MOMENT.known is None else _MOMENT.known
    new = [one for one in parameters if id(one) not in known]
    try:
        found = fingerprints(list(map(_bits, new)))
    except _UNREADABLE:
        found = list(map(_print, new))
    known.update((id(one), (one, each)) for one, each in zip(new, found, strict=True))
    return [known[id(one)][1] for one in parameters]


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
