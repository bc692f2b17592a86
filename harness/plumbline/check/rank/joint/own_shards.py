"""Tells over which dimensions of a mesh each rank computes a loss of its own from its shard of a DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from plumbline.recording.sharding import dtensors, local
from plumbline.replay.alias import CallOutputs

_OUTPUTS: Any = CallOutputs._backward_cls
"""The node of a tracked call's outputs."""

_TO_LOCAL, _FROM_LOCAL = "_ToTorchTensorBackward", "_FromTorchTensorBackward"
"""The nodes of ``DTensor.to_local`` and ``DTensor.from_local``."""


def dimensions_of_shards(roots: Iterable[Any]) -> dict[int, frozenset[int]]:
    """Return the dimensions of the mesh over which losses use only this rank's shard of a call's outputs.

    The keys are the numbers of the calls between which and the losses DTensors become tensors. A loss that is a DTensor
    is one loss of all ranks.
    """
    found: dict[int, frozenset[int]] = {}
    nothing: frozenset[int] = frozenset()
    waiting = [(root.grad_fn, nothing) for root in roots]
    seen = set()
    while waiting:
        node, dimensions = waiting.pop()
        if node is None or (node, dimensions) in seen:
            continue
        seen.add((node, dimensions))
        following = [one for one, _ in node.next_functions]
        if isinstance(node, _OUTPUTS):
            number = node.call.number
            found[number] = found.get(number, dimensions) & dimensions
            following = following if node.call.is_distributed else [*node.arguments]
            dimensions = nothing
        elif type(node).__name__ == _TO_LOCAL:
            dimensions = frozenset(i for i, one in enumerate(node.dtensor_spec.placements) if one.is_shard())
        elif type(node).__name__ == _FROM_LOCAL:
            dimensions = nothing
        waiting += [(one, dimensions) for one in following]
    return found


def along_dimensions(cotangents: Mapping[int, Sequence[Tensor | None]]) -> dict[int, list[int]]:
    """Return the ranks along each dimension of the mesh of a call's output, if it is a DTensor."""
    arrived: Iterable[Any] = (one for own in cotangents.values() for one in own if hasattr(one, "device_mesh"))
    mesh = next((one.device_mesh for one in arrived), None)
    if mesh is None:
        return {}
    return {i: torch.distributed.get_process_group_ranks(mesh.get_group(i)) for i in range(mesh.ndim)}


def gathered_over_others(tensor: Any, placements: Sequence[Any], dimensions: frozenset[int]) -> Tensor:
    """Return this rank's part of a DTensor: it stays sharded only over these dimensions, as in ``placements``."""
    replicate = dtensors().Replicate()
    wanted = [one if i in dimensions and one.is_shard() else replicate for i, one in enumerate(placements)]
    return local(tensor.redistribute(placements=wanted))
