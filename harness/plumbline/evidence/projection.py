"""Random projections of tensors, and fingerprints of their bits.

A tensor x of n entries is read as rows of C columns. P x has ROWS numbers per column: each is a sum over the rows,
weighted with fixed numbers from an integer hash. So P is the same on every device and in every version of torch; P (a
- b) = P a - P b; and E |P x|² = |x|² over the choice of weights. The tensor is read chunk by chunk, with buffers that
fit into a cache, which costs about as much as copying the tensor.

The weights are small integers and sums are float64, so their rounding errors are far below those of float32. For the
same reason, a float64 number is split into its leading and its trailing bits. Needs only torch, because it runs on
ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

ROWS = 8
"""Numbers of the projection for each column; an error in a column changes all of them."""

NUMBERS = 512
"""The default count of numbers in a projection: they determine a squared norm to 6 %, and take 4 KiB."""

CHUNK = 1024
"""Rows that share one matrix of weights. Chunks differ by a factor for each number."""

GROUP = 2**18
"""Entries read at once on a cpu: they fit into its cache. A multiple of every chunk's size."""

GROUP_ON_DEVICE = 2**22
"""The same on an accelerator, where many small kernel launches would cost more than the memory."""

_SCALE = 2.0**-15
"""Makes the average norm of a projection that of the tensor, to a thousandth. A power of two, so it rounds nothing."""

_LEAST_WEIGHT, _LEAST_FACTOR = 65, 85
"""Weights are between 65 and 128, factors between 85 and 148: 8 × the product of their mean squares is nearly 4¹⁵."""

_WORDS = 1024

_BLOCK = 32
"""Chunks whose factors are computed together, and cached for later tensors."""


def fingerprint(tensor: Tensor) -> int:
    """Return a hash of a tensor's values. Equal tensors of one shape and dtype have equal ones.

    Different tensors have equal ones with a probability of about 2⁻⁶³, and of 2⁻²⁹ if they differ only in two signs.
    """
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return the fingerprint of each tensor. Together, small tensors take far fewer operations than alone."""
    found: dict[int, int] = {}
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for number, one in enumerate(tensors):
        kinds[one.dtype, one.device].append(number)
    for numbers in kinds.values():
        own = [tensors[number].detach() for number in numbers]
        rows = torch.cat([_row_hashes(parts) for parts in _packed(own)])
        prints = _fingerprints(rows, [one.numel() for one in own], own[0].element_size())
        found.update(zip(numbers, prints, strict=True))
    return [found[number] for number in range(len(tensors))]


def project(tensor: Tensor, numbers: int = NUMBERS, *, split: bool = True) -> Tensor:
    """Return P x, float64 on the CPU: one row, or two rows to be added, of the leading and of the trailing bits.

    Args:
        tensor: of any shape and strides, with floating-point numbers. It is projected where it lies.
        numbers: a power of two, from 8 to 2048.
        split: False leaves float64 numbers whole, so that there is one row. Sums over n entries then round as sums in
            float64 do: by about √n 2⁻⁵³ of the norm (Higham and Mary 2019), which is enough where float32's rounding is
            the noise.
    """
    flat = tensor.detach().reshape(-1)
    count, columns, device = flat.numel(), numbers // ROWS, flat.device
    split = split and flat.dtype == torch.float64
    rows = max(1, min(CHUNK, -(-count // columns)))  # all if one chunk is enough
    chunk = rows * columns
    sums: list[Tensor] = []
    for part in torch.split(flat, _group(device)):
        size = part.numel()
        wide = _scratch("wide", max(chunk, _multiple(size, chunk)), torch.float64, device)
        if size < wide.numel():
            wide[size:].zero_()
        wide[:size].copy_(part)
        weights, factors = _weights(len(sums) * (_group(device) // chunk), wide.numel() // chunk, rows, columns, device)
        halves = _halves(wide) if split else (wide,)
        sums.append(
            torch.stack([torch.matmul(weights, one.view(-1, rows, columns)).mul_(factors).sum(0) for one in halves])
        )
    made = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return (made * _SCALE).flatten(1).cpu()


def _group(device: torch.device) -> int:
    return GROUP if device.type == "cpu" else GROUP_ON_DEVICE


def _packed(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parts of tensors of one kind, in order, as many at a time as one group has room for.

    A tensor that is not contiguous is copied only when it is its turn.
    """
    parts: list[Tensor] = []
    size, group = 0, _group(tensors[0].device)
    for part in (each for one in tensors for each in torch.split(one.reshape(-1), group)):
        length = _multiple(part.numel(), 8 * _WORDS)
        if size + length > group:
            yield parts
            parts, size = [], 0
        parts.append(part)
        size += length
    yield parts


def _row_hashes(parts: Sequence[Tensor]) -> Tensor:
    """Return the hashes of the rows of words in the bits of parts, with zeros after each part.

    Bits are read as int64 words, in rows of ``_WORDS``; zeros fill the last rows, and change no hash.
    """
    sizes = [_multiple(one.numel(), 8 * _WORDS) for one in parts]
    bits = _scratch("bits", sum(sizes), parts[0].dtype, parts[0].device)
    for part, place in zip(parts, torch.split(bits, sizes), strict=True):
        torch.add(part, 0, out=place[: part.numel()])  # + 0 turns -0.0 into 0.0, so that equal numbers have equal bits
        place[part.numel() :].zero_()
    return _row_sums(bits)


def _fingerprints(rows: Tensor, counts: Sequence[int], itemsize: int) -> list[int]:
    """Return the fingerprints of tensors with so many entries, from the hashes of the rows of all of them."""
    sizes = [_multiple(one, 8 * _WORDS) // (8 * _WORDS) * itemsize for one in counts]
    numbers = torch.arange(1, max(sizes) + 1, device=rows.device)
    places = torch.cat([numbers[:size] for size in sizes])
    mixed = scrambled(rows + scrambled(places))
    sums = torch.stack([one.sum() for one in torch.split(mixed, sizes)]).tolist()
    return [one ^ count for one, count in zip(sums, counts, strict=True)]


class _Memory(threading.local):
    """Buffers of this thread, by use, dtype and device: allocating memory costs more than the computation in it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_MEMORY = _Memory()


def free_buffers() -> None:
    """Free the buffers of this thread. They are allocated again when they are needed."""
    _MEMORY.buffers.clear()


def _scratch(use: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory, which is reused for the next tensor."""
    key = use, dtype, device
    if key not in _MEMORY.buffers or _MEMORY.buffers[key].numel() < size:
        _MEMORY.buffers[key] = torch.empty(size, dtype=dtype, device=device)
    return _MEMORY.buffers[key][:size]


def _halves(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split float64 into leading and trailing bits (Dekker's way), so that sums of either hardly round."""
    leading, trailing = (_scratch(use, wide.numel(), torch.float64, wide.device) for use in ("leading", "trailing"))
    torch.mul(wide, 2.0**29 + 1, out=leading)
    torch.sub(leading, wide, out=trailing)
    leading.sub_(trailing)
    torch.sub(wide, leading, out=trailing)
    return leading, trailing


def _row_sums(bits: Tensor) -> Tensor:
    """Return a hash of each row of words, which depends on the place of every word.

    A product with an odd number is one to one. Its upper half is folded into the lower one because two changed sign
    bits would cancel otherwise.
    """
    given = bits.view(torch.int64).view(-1, _WORDS)
    products, shifted = (_scratch(use, given.numel(), torch.int64, bits.device).view_as(given) for use in ("*", ">>"))
    torch.mul(given, _word_weights(bits.device), out=products)
    torch.bitwise_right_shift(products, 29, out=shifted)
    return products.bitwise_xor_(shifted).sum(1)


@lru_cache(maxsize=16)
def row_weights(device: torch.device) -> Tensor:
    """Return the weights (ROWS, CHUNK) of the rows of a chunk."""
    return _integers(torch.arange(ROWS * CHUNK, device=device), _LEAST_WEIGHT).view(ROWS, CHUNK)


@lru_cache(maxsize=512)
def _weights(first: int, chunks: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return row_weights(device)[:, :rows], _chunk_factors(first, chunks, columns, device)


def _chunk_factors(first: int, chunks: int, columns: int, device: torch.device) -> Tensor:
    """Return the factors (``chunks``, ROWS, ``columns``) of ``chunks`` chunks, beginning with number ``first``.

    Without them, values with opposite signs in two chunks would cancel.
    """
    first_block, last_block = first // _BLOCK, (first + chunks - 1) // _BLOCK
    blocks = [_block_of_factors(one, columns, device) for one in range(first_block, last_block + 1)]
    made = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return made[first - first_block * _BLOCK :][:chunks]


@lru_cache(maxsize=64)
def _block_of_factors(block: int, columns: int, device: torch.device) -> Tensor:
    """Return the factors of ``_BLOCK`` chunks. Most tensors are small, and need only the first ones."""
    size = ROWS * columns * _BLOCK
    places = torch.arange(block * size, (block + 1) * size, device=device)
    return _integers(places + 2**40, _LEAST_FACTOR).view(_BLOCK, ROWS, columns)


def _integers(places: Tensor, least: int) -> Tensor:
    """Return a random integer for each place, as float64: one of the 64 sizes from ``least`` on, with a random sign."""
    random = scrambled(places)
    return ((random & 63) + least).double() * ((random >> 6 & 1) * 2 - 1)


@lru_cache(maxsize=16)
def _word_weights(device: torch.device) -> Tensor:
    return scrambled(torch.arange(_WORDS, device=device) + 2**41) | 1


def scrambled(numbers: Tensor) -> Tensor:
    """Return a well-mixed int64 for each int64: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = numbers * -7046029254386353131  # 2⁶⁴ / golden ratio
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
