"""Copies tensors for the evidence: a dense copy, a reference to the store, or this rank's shard of a sharded tensor.

A rank does not communicate with others for this: a rank that hangs elsewhere would not answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plumbline.evidence.tensor_store import TensorStore, reference
from plumbline.evidence.trace import Shard, StoredTensor

PLAIN = (Tensor, nn.Parameter)
"""Tensor classes that are known not to be DTensors."""

BLOCKS = ("Shard", "_StridedShard", "Replicate")
"""Class names of placements with which a rank holds a block of a DTensor."""


def kept(tensor: Tensor | Shard, store: TensorStore | None) -> Any:
    """Return what is recorded of a weight or gradient, on the CPU.

    For a DTensor, as FSDP2 makes them, or for a declared part, this is the rank's shard. For any other tensor it is a
    reference if ``store`` takes the tensor, or else a dense copy.
    """
    if isinstance(tensor, Shard) or _is_shared_out(tensor):
        return _shard(tensor)
    dense = _dense(tensor)
    return store.keep(dense) if store is not None and store.takes(dense) else copied(dense)


def is_still(tensor: Tensor | Shard, recorded: Any) -> bool:
    """Return whether, on this rank, a tensor still equals the one from which ``recorded`` was made."""
    sharded = isinstance(tensor, Shard) or _is_shared_out(tensor)
    if isinstance(tensor, Shard) or sharded or isinstance(recorded, Shard):
        if not (sharded and isinstance(recorded, Shard)):
            return False
        values, *place = _placed(tensor)
        return place == [recorded.begin, recorded.shape, recorded.ranks] and _is_equal(values, recorded.values)
    return reference(tensor) == recorded if isinstance(recorded, StoredTensor) else _is_equal(tensor, recorded)


def is_zero(recorded: Any) -> bool:
    """Return whether all entries of a recorded tensor are zero on this rank."""
    if isinstance(recorded, StoredTensor):
        return recorded == reference(torch.zeros(recorded.shape, dtype=getattr(torch, recorded.dtype)))
    values = recorded.values if isinstance(recorded, Shard) else recorded
    return not values.any()


def is_flattened(tensor: Tensor) -> bool:
    """Return whether a tensor is a FlatParameter of FullyShardedDataParallel, which concatenates several parameters."""
    return getattr(tensor, "_is_flat_param", False)


def copied(tensor: Tensor) -> Tensor:
    """Return a dense copy on the CPU."""
    return _dense(tensor).to("cpu", copy=True)


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.dtype == copy.dtype and torch.equal(tensor.detach().cpu(), copy)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _is_shared_out(tensor: Tensor) -> bool:
    # A DTensor is recognized by an attribute: its class has moved between torch versions, and is slow to import.
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def _shard(tensor: Tensor | Shard) -> Shard:
    values, *place = _placed(tensor)
    return Shard(copied(values), *place)


def _placed(tensor: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return this rank's part of a tensor, where it begins, the shape of the whole, and the ranks with its parts.

    Along each dimension of its mesh, a DTensor is replicated, or sharded along a dimension of its own as by
    ``torch.chunk``. Strided shards are divided last, outer mesh dimensions after inner ones: fully_shard divides the
    blocks of tensor parallelism, whose mesh dimension is an inner one. There are no ranks if the part is not a block.
    """
    if isinstance(tensor, Shard):
        return tensor.values, tensor.begin, tensor.shape, tensor.ranks
    with torch.no_grad():  # else autograd would record it
        values: Tensor = tensor.to_local()
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    begin, size = [0] * len(shape), list(shape)
    placed = list(enumerate(zip(mesh.get_coordinate() or (), tensor.placements, strict=False)))
    copy = [slice(None) if _divides(placement) else place for _, (place, placement) in placed]
    strided = [one for one in placed if _is_strided(one[1][1])]
    for dimension, (place, placement) in [one for one in placed if one not in strided] + strided[::-1]:
        if _divides(placement):
            chunk = -(-size[placement.dim] // mesh.size(dimension))
            first = min(place * chunk, size[placement.dim])
            begin[placement.dim] += first
            size[placement.dim] = min(chunk, size[placement.dim] - first)
    known = all(type(placement).__name__ in BLOCKS for placement in tensor.placements)
    is_block = known and len(copy) == mesh.ndim and tuple(values.shape) == tuple(size)
    return values, tuple(begin), shape, tuple(mesh.mesh[tuple(copy)].flatten().tolist()) if is_block else ()


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _divides(placement: Any) -> bool:
    return placement.is_shard() or _is_strided(placement)
