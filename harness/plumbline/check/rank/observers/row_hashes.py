"""Hashes of the rows of input tensors, which recognise equal rows on another rank or in another epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts
from plumbline.evidence.projection import scrambled
from plumbline.recording.patching import attempt

ROWS_KEPT = 256
"""The most rows whose hashes are kept. Of a larger batch the smallest hashes are kept, the same on every rank."""

_ENTRIES_AT_ONCE = 2**17
"""This many entries and their intermediate results fit into a CPU's cache."""

_ENTRIES_AT_ONCE_ON_DEVICE = 2**23
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], ends: Callable[[], list[int] | None] = lambda: None
) -> Facts | None:
    """Return the facts about the rows (dim 0) of a call's input tensors, None if it has none.

    ``in_rows`` says which tensors make up the rows. ``hashes`` are in the order of rows if all of them are kept. If the
    rows are tokens, and ``cu_seqlens`` or ``ends`` has the places where documents end, each document counts as a row.
    """
    tensors = in_rows(tensor for tensor in tensors_in((args, kwargs)) if tensor.numel() and _is_readable(tensor))
    if not tensors:
        return None
    hashes = row_hashes(tensors)
    places = _document_ends(kwargs, len(hashes))
    if places is None and all(tensor.dim() == 1 for tensor in tensors):
        places = attempt(ends)
    if places is not None and places[-1] == len(hashes):
        hashes = [hash(tuple(hashes[start:end])) for start, end in pairwise(places)]
    kept = hashes if len(hashes) <= ROWS_KEPT else sorted(hashes)[:ROWS_KEPT]
    return {
        "shapes": [list(tensor.shape) for tensor in tensors],
        "rows": len(hashes),
        "distinct": len(set(hashes)),
        "order": digest(hashes),
        "hashes": kept,
    }


def _document_ends(kwargs: Mapping[str, Any], tokens: int) -> list[int] | None:
    for name, one in kwargs.items():
        if name.startswith("cu_seq") and isinstance(one, Tensor) and one.dim() == 1 and len(one) > 1:
            places = [int(place) for place in one.tolist()]
            return places if places[0] == 0 and places[-1] == tokens else None
    return None


def in_rows(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors whose dim 0 holds the rows: of several lengths, the one with the most entries in total."""
    by_length: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dim():
            by_length.setdefault(len(tensor), []).append(tensor)
    return max(by_length.values(), key=lambda some: sum(tensor.numel() for tensor in some), default=[])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def row_hashes(tensors: list[Tensor]) -> list[int]:
    """Return a 64-bit hash for each row of tensors of equal length in dim 0, from the bits of all tensors."""
    total: Tensor | None = None
    for index, tensor in enumerate(tensors):
        hashes = scrambled(_row_sums(_words(tensor)) + (index + 1) * 0x9E3779B97F4A7C1)
        total = hashes if total is None else total + hashes.to(total.device)
    return [] if total is None else [int(number) for number in total.cpu().tolist()]


def digest(numbers: list[int]) -> str:
    """Return a short digest of whole numbers in their order."""
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).hexdigest()


def _is_readable(tensor: Tensor) -> bool:
    """Say whether a tensor is a plain dense one: not on the meta device, sparse, nested, quantized or distributed."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor (rows, …) as integers (rows, entries of a row)."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    flat = plain.reshape(len(plain), -1).contiguous()
    eight = 8 // flat.element_size()
    whole = flat.shape[1] % eight == 0 and flat.storage_offset() % eight == 0
    return flat.view(torch.int64 if whole else _WORDS[flat.element_size()])


def _row_sums(words: Tensor) -> Tensor:
    """Return a number (rows) for each row, which depends on the place of every entry."""
    rows, entries = words.shape
    at_once = _ENTRIES_AT_ONCE if words.device.type == "cpu" else _ENTRIES_AT_ONCE_ON_DEVICE
    columns = max(1, at_once // max(rows, 1))
    total = torch.zeros(rows, dtype=torch.int64, device=words.device)
    for start in range(0, entries, columns):
        part = words[:, start : start + columns].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.shape[1], device=words.device)
        # A product with an odd number is one to one; the fold lets its upper bits count as well.
        products = part * (scrambled(places) | 1)
        total += (products ^ (products >> 29)).sum(1)
    return total
