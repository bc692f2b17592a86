"""Prepares sharded modules for a replay: gathered parameters replace shards, and FSDP's own steps are removed.

All ranks of a mesh gather parameters together, so every rank must request them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plumbline.recording.flat_sharding import flat_units, is_fully_sharded, part_of, plain_forward
from plumbline.recording.sharding import arrival_leaves, is_hook_of_zero, is_run
from plumbline.replay.nested import map_tensors

_FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")

_CASTS = "torch.distributed.fsdp._common_utils"
"""The module of hooks that only cast. FSDP1 puts them around modules that are excluded from its mixed precision."""


def shards(module: nn.Module) -> dict[int, Tensor]:
    """Return the sharded parameters of a module by the identities of their unsharded leaves."""
    return {id(leaf): shard for shard, leaf in arrival_leaves([module])}


def computing_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtypes in which modules compute with sharded parameters, by the identities of the shards."""
    flat = {id(one): unit.dtype for unit in flat_units(module) for one in unit.parameters}
    return flat | {id(shard): leaf.dtype for shard, leaf in arrival_leaves([module])}


def is_distributed(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor")


def is_gathered(parameter: Tensor) -> bool:
    """Return whether the values of a parameter have to be gathered from several ranks."""
    return is_distributed(parameter) or is_run(parameter) or part_of(parameter) is not None


def is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is freed, as for FSDP1's views into a flat parameter between forwards."""
    if tensor.layout is not torch.strided or tensor.is_meta or is_distributed(tensor):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def place_flat(module: nn.Module, leaf_of: Callable[[Tensor], Tensor]) -> None:
    """Replace the parameters that FSDP1 has flattened by leaves, or by views of a flat leaf."""
    for unit in flat_units(module):
        is_flat = unit.parameters[0] is unit.flat
        leaves = unit.views(leaf_of(unit.flat)) if is_flat else list(map(leaf_of, unit.parameters))
        for (holder, name), leaf in zip(unit.places(), leaves, strict=True):
            _place(holder, name, leaf)
        for holder, name, first, first_name in unit.shared_places():
            _place(holder, name, getattr(first, first_name))


def _place(holder: nn.Module, name: str, leaf: Tensor) -> None:
    holder._parameters.pop(name, None)
    vars(holder).pop(name, None)
    setattr(holder, name, leaf)


def replace_forwards(modules: Iterable[nn.Module]) -> None:
    """Make wrappers only call their module, and FSDP1's also cast inputs: there is nothing to gather or to reduce."""
    for module in modules:
        if is_fully_sharded(module):
            vars(module)["forward"] = plain_forward(module, _cast)
        elif isinstance(module, DistributedDataParallel):
            vars(module)["forward"] = module.module


def replace_hooks(modules: Iterable[nn.Module]) -> None:
    """Replace FSDP2's hooks by hooks that only cast, and ZeRO's by none: there is nothing to gather or to reduce."""
    for module in modules:
        for hooks, replacement in ((module._forward_pre_hooks, _cast_inputs), (module._forward_hooks, _cast_outputs)):
            for key, hook in hooks.items():
                if _is_fsdp(hook):
                    hooks[key] = replacement(module)
                elif is_hook_of_zero(hook):
                    hooks[key] = _nothing


def _nothing(*args: Any) -> None:
    pass


def _is_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    name = getattr(hook, "__module__", "") if owner is None else type(owner).__module__
    return str(name).startswith(_FSDP) and name != _CASTS


def _policy(module: nn.Module) -> Any:
    get_state: Any = getattr(module, "_get_fsdp_state", None)
    return None if get_state is None else getattr(get_state(), "_mp_policy", None)


def _cast_inputs(module: nn.Module) -> Callable[..., Any]:
    policy = _policy(module)
    dtype = getattr(policy, "param_dtype", None) if getattr(policy, "cast_forward_inputs", False) else None

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), dtype)

    return hook


def _cast_outputs(module: nn.Module) -> Callable[..., Any]:
    dtype = getattr(_policy(module), "output_dtype", None)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return hook


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return map_tensors(value, lambda one: one.to(dtype) if one.is_floating_point() else one)
