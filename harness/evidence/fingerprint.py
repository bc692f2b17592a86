"""A hash of a tensor's bits: 64 bits that are the same on every device and in every version of torch.

Equal tensors of one shape and dtype have the same one, and two that differ do so with a probability of 2⁻⁶⁴ only. It
costs about as much as copying the tensor does, and is computed where the tensor lies. Needs torch and nothing else,
since it runs on ranks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from harness.evidence.scratch_memory import groups, padded, scratch

_WORDS = 1024
"""Bits are read as int64 words, in rows of so many; what is left over is zeros, which count for nothing."""


def fingerprint(tensor: Tensor) -> int:
    """Return the hash of a dense tensor of floating-point numbers, of any shape and strides. -0.0 counts as 0.0."""
    rows = [_row_sums(part) for _, part in groups(tensor)]
    sums = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    places = torch.arange(1, sums.numel() + 1, device=sums.device)
    return int(scrambled(sums + scrambled(places)).sum()) ^ tensor.numel()


def scrambled(numbers: Tensor) -> Tensor:
    """Return a well-mixed int64 for each int64: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = numbers * -7046029254386353131  # 2⁶⁴ / golden ratio
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1)


def _row_sums(part: Tensor) -> Tensor:
    """Return a number for each row of words, in which every word's place counts.

    A product with an odd number is one to one; folding its upper half into the lower one makes sign bits, of which
    two would otherwise cancel, count like all others.
    """
    bits = padded("bits", part.numel(), 8 * _WORDS, part.dtype, part.device)
    # + 0 turns -0.0 into 0.0: what is equal has equal bits.
    torch.add(part, 0, out=bits[: part.numel()])
    words = bits.view(torch.int64).view(-1, _WORDS)
    products, shifted = (scratch(use, words.numel(), torch.int64, bits.device).view_as(words) for use in ("*", ">>"))
    torch.mul(words, _weights_of_words(str(bits.device)), out=products)
    torch.bitwise_right_shift(products, 29, out=shifted)
    return products.bitwise_xor_(shifted).sum(1)


@lru_cache(maxsize=16)
def _weights_of_words(device: str) -> Tensor:
    return scrambled(torch.arange(_WORDS, device=device) + 2**41) | 1
