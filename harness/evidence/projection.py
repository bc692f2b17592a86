"""A linear projection of a large tensor to a few numbers.

A tensor x of n entries is read as rows of C columns, and P x has ROWS numbers a column: each is a sum over the rows,
weighted with fixed numbers that follow from an integer hash. So P x is the same on every device and in every version
of torch; P (a - b) = P a - P b; and E |P x|² = |x|² over the choice of weights. Read chunk by chunk, with buffers
that fit into a cache, it costs about as much as copying the tensor does.

The weights are small integers and sums are float64: they round far below float32. A float64 number is taken as two,
its leading and its trailing bits, for the same reason. Needs torch and nothing else, since it runs on ranks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from harness.evidence.fingerprint import scrambled
from harness.evidence.scratch_memory import groups, padded

ROWS = 8
"""Numbers for each column: an error in a column changes them."""

CHUNK = 1024
"""Rows that share one matrix of weights; chunks differ by a factor for each number."""

_SCALE = 2.0**-15
"""Makes a projection as long as what it projects on average, to a thousandth: a power of two, which rounds nothing."""

_LEAST_WEIGHT, _LEAST_FACTOR = 65, 85
"""Weights are between 65 and 128, factors between 85 and 148: 8 × their mean squares is nearly 4¹⁵."""


def project(tensor: Tensor, numbers: int) -> Tensor:
    """Return P x, float64 on the cpu, of one row, or of two that add up where the tensor is float64.

    Args:
        tensor: dense, floating-point, of any shape and strides; it is read where it lies.
        numbers: the length of a row: a power of two, from 8 to 2048.
    """
    columns = numbers // ROWS
    rows = max(1, min(CHUNK, -(-tensor.numel() // columns)))  # all of them where one chunk is enough
    chunk = rows * columns
    weights = _row_weights(str(tensor.device))[:, :rows]
    sums = torch.zeros(1 + (tensor.dtype == torch.float64), ROWS, columns, dtype=torch.float64, device=tensor.device)
    for start, part in groups(tensor):
        wide = padded("wide", part.numel(), chunk, torch.float64, part.device)
        wide[: part.numel()].copy_(part)
        factors = _chunk_factors(start // chunk, wide.numel() // chunk, columns, wide.device)
        for place, half in enumerate(_halves(wide, part.dtype)):
            sums[place] += (torch.matmul(weights, half.view(-1, rows, columns)) * factors).sum(0)
    return (sums * _SCALE).flatten(1).cpu()


def _halves(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Split float64 into leading and trailing bits (Dekker's way), so that sums of either hardly round."""
    if dtype != torch.float64:
        return (wide,)
    large = wide * (2.0**29 + 1)
    leading = large - (large - wide)
    return leading, wide - leading


@lru_cache(maxsize=16)
def _row_weights(device: str) -> Tensor:
    """Return the weights (ROWS, CHUNK) of the rows of a chunk."""
    return _integers(torch.arange(ROWS * CHUNK, device=device), _LEAST_WEIGHT).view(ROWS, CHUNK)


def _chunk_factors(first: int, chunks: int, columns: int, device: torch.device) -> Tensor:
    """Return the factors (``chunks``, ROWS, ``columns``) of as many chunks, the first of them the ``first``.

    Without them what has opposite signs in two chunks would cancel.
    """
    size = ROWS * columns
    places = torch.arange(first * size, (first + chunks) * size, device=device)
    return _integers(places + 2**40, _LEAST_FACTOR).view(chunks, ROWS, columns)


def _integers(places: Tensor, least: int) -> Tensor:
    """Return a random integer for each place, as float64: its size is one of 64 from ``least`` on, of either sign."""
    random = scrambled(places)
    return ((random & 63) + least).double() * ((random >> 6 & 1) * 2 - 1)
