"""Parameters that are sharded over ranks: how to recognize and gather them, and where their gradients arrive."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from plumbline.recording.flat_sharding import flat_units, part_of


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered, for which all its ranks must call this, and any other tensor unchanged."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: a DTensor's shard, any other tensor itself."""
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor's gradient with the placements of the parameter. All ranks that hold it must call this.

    If the forward shards the rows, torch leaves an unreduced sum (``Partial``) in ``.grad``, which the optimizer's own
    operations reduce.
    """
    if not is_laid_out_otherwise(gradient, parameter):
        return gradient
    asked, like = cast("Any", gradient), cast("Any", parameter)
    laid_out: Tensor = asked.redistribute(placements=like.placements)
    return laid_out


def distributed(values: Tensor, mesh: Any, placements: Any) -> Tensor:
    """Return a whole tensor, which every rank of a mesh has, as a DTensor. All of them must call this."""
    distribute = dtensors().distribute_tensor
    known = inspect.signature(distribute).parameters
    own_values = {"src_data_rank": None} if "src_data_rank" in known else {}  # torch 2.6 sends one rank's to all
    laid_out: Tensor = distribute(values, mesh, placements, **own_values)
    return laid_out


def dtensors() -> Any:
    """Return the module of ``DTensor`` and its placements, which torch 2.4 keeps elsewhere."""
    public = import_module("torch.distributed.tensor")
    return public if hasattr(public, "DTensor") else import_module("torch.distributed._tensor")


def is_laid_out_otherwise(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether both are DTensors, and their placements differ."""
    placements, own = getattr(gradient, "placements", None), getattr(parameter, "placements", None)
    return placements is not None and own is not None and tuple(placements) != tuple(own)


def is_flat(parameter: Tensor) -> bool:
    """Return whether a parameter is, or lies in, a flat one of FullyShardedDataParallel, at which gradients arrive."""
    return bool(getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False))


def is_data_parallel_shard(parameter: Tensor) -> bool:
    """Return whether data-parallel ranks hold shards of a parameter, although its type does not show it.

    FullyShardedDataParallel does so, and DeepSpeed's ZeRO 3, which marks parameters by ``ds_id``.
    """
    return is_flat(parameter) or hasattr(parameter, "ds_id")


def is_shard(tensor: Tensor) -> bool:
    """Return whether this rank holds only a shard of a tensor; a DTensor's shard may be all of it."""
    if (part := part_of(tensor)) is not None:
        return part.unit.is_sharded
    placements = getattr(tensor, "placements", None) or ()
    return is_data_parallel_shard(tensor) or any(type(one).__name__ != "Replicate" for one in placements)


def is_replicated(tensor: Tensor, ranks: int = 0) -> bool:
    """Return whether a tensor is a DTensor that is replicated over its mesh, which has ``ranks`` ranks if given."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None or (ranks and mesh.size() != ranks):
        return False
    return all(type(one).__name__ == "Replicate" for one in placements)


def arrival_leaves(roots: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that ``fully_shard`` shards, and the unsharded leaf at which its local gradient arrives."""
    for one in _sharded(roots):
        if isinstance(leaf := getattr(one, "_unsharded_param", None), Tensor):
            yield one.sharded_param, leaf


def shards_of_fsdp2(roots: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield each parameter that ``fully_shard`` shards, including those that were never unsharded."""
    return (one.sharded_param for one in _sharded(roots))


def reduction_dtypes(roots: Iterable[nn.Module], *, accumulated: bool = False) -> dict[int, torch.dtype]:
    """Return the dtype in which gradients are reduced over ranks, by the id of each sharded parameter.

    The mixed-precision policy sets it; the default is the dtype in which the module computes. FSDP1 accumulates
    gradients in the latter before it reduces them: with ``accumulated``, the coarser one of both counts.
    """
    found = {id(one.sharded_param): one.reduce_dtype or one.param_dtype or one.orig_dtype for one in _sharded(roots)}
    for unit in (unit for root in roots for unit in flat_units(root)):
        dtypes = [*unit.reduction_dtypes(), *([unit.dtype] if accumulated else [])]
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        found.update((id(one), coarsest) for one in unit.parameters)
    return found


def requested_divisors(roots: Iterable[nn.Module]) -> set[float]:
    """Return the divisors of summed gradients that scripts set in FSDP2, as multiples of the number of ranks.

    Some groups of parameters may be reduced over fewer ranks than others, such as experts, whose tokens already came
    from all ranks. So a divisor that the script sets is a multiple of the ranks of the largest group.
    """
    every = (group for root in roots for module in root.modules() for group in _groups(module))
    groups = [group for group in every if group.fsdp_params]
    ranks = max(map(_reducing_ranks, groups), default=1)
    factors = [getattr(group, "gradient_divide_factor", None) for group in groups]
    return {1.0 if factor is None else float(factor) / ranks for factor in factors}


def _reducing_ranks(group: Any) -> int:
    return math.prod(getattr(group.mesh_info, name, 1) for name in ("shard_mesh_size", "replicate_mesh_size"))


def _sharded(roots: Iterable[nn.Module]) -> Iterator[Any]:
    for root in roots:
        for module in root.modules():
            for group in _groups(module):
                yield from group.fsdp_params


def holds_gradients_back(roots: Iterable[nn.Module]) -> bool:
    """Return whether FSDP2 was told not to reduce the gradients of some part of these modules."""
    groups = [group for root in roots for module in root.modules() for group in _groups(module)]
    return any(not (group.reduce_grads and group.all_reduce_grads) for group in groups)


def _groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of a module's FSDP state; empty if it has no such state."""
    get_state: Any = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.11 a module has at most one
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]


def is_run(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 shards a parameter."""
    return hasattr(parameter, "ds_tensor")


def held(parameter: Tensor) -> Tensor:
    """Return what this rank keeps of a parameter: its range of entries, a DTensor's shard, or all of it."""
    run = getattr(parameter, "ds_tensor", None)
    return local(parameter) if run is None else run


def gathered(parameter: Tensor) -> Tensor:
    """Return a gathered copy of a parameter that ZeRO 3 shards. All ranks must call this."""
    if parameter.numel() == getattr(parameter, "ds_numel", None):  # small ones are not released between the steps
        return parameter.detach().clone()
    zero: Any = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def is_hook_of_zero(hook: Any) -> bool:
    """Return whether a hook of a module gathers and releases parameters for ZeRO 3."""
    decorated = getattr(hook, "__closure__", None) or ()  # DeepSpeed's decorators keep no names
    functions = [hook]
    for cell in decorated:
        with suppress(ValueError):  # the cell is empty
            functions.append(cell.cell_contents)
    return any(str(getattr(one, "__module__", "")).startswith("deepspeed.runtime.zero.") for one in functions)
