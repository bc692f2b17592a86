"""Hand-written averages of gradients over the ranks: each adds the same numbers in a different order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Sum = Callable[[Tensor, int], None]
"""Sums a flat tensor over all ranks, in place; the number is a chunk's size."""


def sum_over_ranks(kind: str, tensors: Sequence[Tensor], chunk: int) -> None:
    """Sum each tensor over all ranks, in place, by the method ``kind`` of ``SUMS``."""
    if kind == "per-parameter":
        for tensor in tensors:
            dist.all_reduce(tensor)
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    SUMS[kind](flat, chunk)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _flat(flat: Tensor, chunk: int) -> None:
    dist.all_reduce(flat)


def _chunks(flat: Tensor, chunk: int) -> None:
    for work in [dist.all_reduce(part, async_op=True) for part in torch.split(flat, chunk)]:
        assert work is not None
        work.wait()


def _tree(flat: Tensor, chunk: int) -> None:
    """Add in pairs, then pairs of pairs, up to rank 0, which broadcasts the sum."""
    rank, world, stride = dist.get_rank(), dist.get_world_size(), 1
    while stride < world:
        if rank % (2 * stride) == stride:
            dist.send(flat, rank - stride)
        elif rank % (2 * stride) == 0 and rank + stride < world:
            other = torch.empty_like(flat)
            dist.recv(other, rank + stride)
            flat += other
        stride *= 2
    dist.broadcast(flat, 0)


def _ring(flat: Tensor, chunk: int) -> None:
    """Each rank adds its part to the sum of the rank before it; the last has the total."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        before = torch.empty_like(flat)
        dist.recv(before, rank - 1)
        flat += before
    if rank + 1 < world:
        dist.send(flat, rank + 1)
    dist.broadcast(flat, world - 1)


def _scatter_gather(flat: Tensor, chunk: int) -> None:
    """Each rank sums one part, and all ranks gather the parts."""
    world = dist.get_world_size()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % world)])
    own = padded.new_empty(len(padded) // world)
    dist.reduce_scatter_tensor(own, padded)
    dist.all_gather_into_tensor(padded, own)
    flat.copy_(padded[: len(flat)])


def _gather(flat: Tensor, chunk: int) -> None:
    """Every rank gathers all parts, and adds them from the last to the first."""
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    flat.copy_(total)


def _from_one_rank(flat: Tensor, chunk: int) -> None:
    """The last rank sums everything, and broadcasts the result."""
    last = dist.get_world_size() - 1
    dist.reduce(flat, last)
    dist.broadcast(flat, last)


SUMS: dict[str, Sum] = {
    "flat": _flat,
    "chunks": _chunks,
    "tree": _tree,
    "ring": _ring,
    "scatter-gather": _scatter_gather,
    "gather": _gather,
    "from-one-rank": _from_one_rank,
}
