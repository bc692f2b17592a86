"""What a rank keeps of a tensor: a copy, a sketch of a large one, its own shard of one that is shared out.

A rank asks the others for nothing: one that has lost its way would not answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.evidence import projection as sketch
from harness.evidence.trace import Shard, Sketch

PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that are known to hold no DTensor."""

BLOCKS = ("Shard", "Replicate")
"""Placements, by the names of their classes, under which a rank holds a block of a DTensor."""


def kept(tensor: Tensor, above: int) -> Any:
    """Return what is kept of weights or gradients, on the cpu.

    It is the shard of a DTensor, as FSDP2's are: whole, because sketches of shards do not add up to that of a tensor.
    It is the sketch of any other one with more than ``above`` entries, and a dense copy else.
    """
    return _shard(tensor) if _is_shared_out(tensor) else sketch.kept(_dense(tensor), above)


def is_still(tensor: Tensor, recorded: Any) -> bool:
    """Return whether a tensor has the bits, on this rank, of which ``recorded`` was kept."""
    if not _is_shared_out(tensor):
        return not isinstance(recorded, Shard) and sketch.is_still(tensor, recorded)
    if not isinstance(recorded, Shard):
        return False
    values, *place = _placed(tensor)
    return place == [recorded.begin, recorded.shape, recorded.ranks] and sketch.is_still(values, recorded.values)


def is_zero(recorded: Any) -> bool:
    """Return whether all entries, on this rank, of a tensor of which ``recorded`` was kept are zero."""
    values = recorded.values if isinstance(recorded, Shard | Sketch) else recorded
    return not values.any()


def is_flattened(tensor: Tensor) -> bool:
    """Return whether a tensor is many, one after the other: FullyShardedDataParallel's FlatParameter."""
    return getattr(tensor, "_is_flat_param", False)


def copied(tensor: Tensor) -> Tensor:
    """Return a dense copy on the cpu."""
    return _dense(tensor).to("cpu", copy=True)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _is_shared_out(tensor: Tensor) -> bool:
    # A DTensor is known by what it has: its class has moved between versions of torch, and is slow to import.
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def _shard(tensor: Tensor) -> Shard:
    values, *place = _placed(tensor)
    return Shard(copied(values), *place)


def _placed(tensor: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return this rank's part of a DTensor, where in it that begins, the whole's shape, and whose parts make it up.

    Along each dimension of its mesh a DTensor is replicated, or sharded along one of its own as ``torch.chunk`` would.
    """
    with torch.no_grad():  # else autograd would note it down
        values: Tensor = tensor.to_local()
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    begin, size = [0] * len(shape), list(shape)
    copy: list[int | slice] = []
    for dimension, (place, placement) in enumerate(zip(mesh.get_coordinate() or (), tensor.placements, strict=False)):
        copy.append(slice(None) if placement.is_shard() else place)
        if placement.is_shard():
            chunk = -(-size[placement.dim] // mesh.size(dimension))
            first = min(place * chunk, size[placement.dim])
            begin[placement.dim] += first
            size[placement.dim] = min(chunk, size[placement.dim] - first)
    known = all(type(placement).__name__ in BLOCKS for placement in tensor.placements)
    is_block = known and len(copy) == mesh.ndim and tuple(values.shape) == tuple(size)
    return values, tuple(begin), shape, tuple(mesh.mesh[tuple(copy)].flatten().tolist()) if is_block else ()
