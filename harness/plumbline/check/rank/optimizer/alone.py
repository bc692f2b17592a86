"""A world of one rank, in which a twin (copy) of an optimizer that communicates can step by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plumbline.recording.sharding import dtensors

_RANKS = ("rank", "global_rank", "group_rank")
_SIZES = ("world_size", "group_size")

_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # maps the group of all ranks to a group of this rank alone


@contextmanager
def alone() -> Iterator[None]:
    """Make torch.distributed and the environment act as if this rank were the only one, communicating with itself."""
    c10d: Any = dist.distributed_c10d
    everyone = c10d._world.default_pg
    own = _own_group()
    if own is None:
        yield
        return
    environment = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    c10d._update_default_pg(own)
    os.environ.update({name: "0" if name == "RANK" else "1" for name in environment})
    try:
        yield
    finally:
        os.environ.update(environment)
        c10d._update_default_pg(everyone)


def _own_group() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    everyone = dist.group.WORLD
    if everyone not in _GROUPS:
        # If a device is bound to the group of all ranks, NCCL would split this group, and all ranks must take part.
        backend = "gloo" if getattr(everyone, "bound_device_id", None) is not None else None
        _GROUPS[everyone] = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    return _GROUPS[everyone]


def as_only_rank(name: str, value: Any) -> Any:
    """Return the value that an attribute or an option of an optimizer has in a world of one rank."""
    if isinstance(value, dist.ProcessGroup):
        return _own_group()
    if isinstance(value, DeviceMesh):
        return own_mesh(value)
    if type(value) is int and name.lstrip("_") in _RANKS:
        return 0
    if type(value) is int and name.lstrip("_") in _SIZES:
        return 1
    return value


def own_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank alone, with as many dimensions as another mesh."""
    groups = [_own_group()] * mesh.ndim
    only = torch.full((1,) * mesh.ndim, dist.get_rank())
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=only, mesh_dim_names=names)


def on_own_mesh(tensor: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """Return a whole tensor as a DTensor of this rank alone, with placements of the same kinds."""
    types = dtensors()
    own = [types.Shard(one.dim) if hasattr(one, "dim") else types.Replicate() for one in placements]
    whole_tensor: Tensor = types.DTensor.from_local(tensor, mesh, own, run_check=False)
    return whole_tensor
