"""What a rank keeps of a tensor: a copy, a reference to a large one in the store, its own shard of a sharded one.

A rank asks the others for nothing: one that has lost its way would not answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plumbline.evidence.tensor_store import TensorStore, reference
from plumbline.evidence.trace import Shard, StoredTensor

PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that are known to hold no DTensor."""

BLOCKS = ("Shard", "_StridedShard", "Replicate")
"""Placements, by the names of their classes, under which a rank holds a block of a DTensor."""


def kept(tensor: Tensor | Shard, store: TensorStore | None) -> Any:
    """Return what is kept of weights or gradients, on the cpu.

    It is the shard of a DTensor, as FSDP2's are, or a declared part, which no other rank has. Of any other one it is a
    reference where ``store`` takes it, and a dense copy else.
    """
    if isinstance(tensor, Shard) or _is_shared_out(tensor):
        return _shard(tensor)
    dense = _dense(tensor)
    return store.keep(dense) if store is not None and store.takes(dense) else copied(dense)


def is_still(tensor: Tensor | Shard, recorded: Any) -> bool:
    """Return whether a tensor has the bits, on this rank, of which ``recorded`` was kept."""
    sharded = isinstance(tensor, Shard) or _is_shared_out(tensor)
    if isinstance(tensor, Shard) or sharded or isinstance(recorded, Shard):
        if not (sharded and isinstance(recorded, Shard)):
            return False
        values, *place = _placed(tensor)
        return place == [recorded.begin, recorded.shape, recorded.ranks] and _is_equal(values, recorded.values)
    return reference(tensor) == recorded if isinstance(recorded, StoredTensor) else _is_equal(tensor, recorded)


def is_zero(recorded: Any) -> bool:
    """Return whether all entries, on this rank, of a tensor of which ``recorded`` was kept are zero."""
    if isinstance(recorded, StoredTensor):
        return recorded == reference(torch.zeros(recorded.shape, dtype=getattr(torch, recorded.dtype)))
    values = recorded.values if isinstance(recorded, Shard) else recorded
    return not values.any()


def is_flattened(tensor: Tensor) -> bool:
    """Return whether a tensor is many, one after the other: FullyShardedDataParallel's FlatParameter."""
    return getattr(tensor, "_is_flat_param", False)


def copied(tensor: Tensor) -> Tensor:
    """Return a dense copy on the cpu."""
    return _dense(tensor).to("cpu", copy=True)


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.dtype == copy.dtype and torch.equal(tensor.detach().cpu(), copy)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _is_shared_out(tensor: Tensor) -> bool:
    # A DTensor is known by what it has: its class has moved between versions of torch, and is slow to import.
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def _shard(tensor: Tensor | Shard) -> Shard:
    values, *place = _placed(tensor)
    return Shard(copied(values), *place)


def _placed(tensor: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return this rank's part of a tensor, where in it that begins, the whole's shape, and whose parts make it up.

    Along each dimension of its mesh a DTensor is replicated, or sharded along one of its own as ``torch.chunk`` would.
    What is strided is divided after everything else, outer dimensions last: fully_shard divides the blocks of tensor
    parallelism, whose dimension of the mesh is an inner one.
    """
    if isinstance(tensor, Shard):
        return tensor.values, tensor.begin, tensor.shape, tensor.ranks
    with torch.no_grad():  # else autograd would note it down
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
