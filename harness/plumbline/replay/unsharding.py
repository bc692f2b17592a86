"""Replays of sharded modules: whole parameters in the places of shards, and what FSDP adds out of the way.

Whole parameters are gathered by all ranks of a mesh together, so that every rank has to ask for them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.recording.flat_sharding import flat_units, is_fully_sharded, part_of, plain_forward
from plumbline.recording.sharding import arrival_leaves
from plumbline.recording.zero3 import is_hook_of_zero, is_run
from plumbline.replay.nested import map_tensors

_FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")

_CASTS = "torch.distributed.fsdp._common_utils"
"""Its hooks only cast: FSDP1 puts them around modules that are left out of its mixed precision."""


def shards(module: nn.Module) -> dict[int, Tensor]:
    """Return the sharded parameters of a module by the identities of their unsharded leaves."""
    return {id(leaf): shard for shard, leaf in arrival_leaves([module])}


def computing_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtypes in which sharded parameters are computed with, by the identities of the shards."""
    flat = {id(one): unit.dtype for unit in flat_units(module) for one in unit.parameters}
    return flat | {id(shard): leaf.dtype for shard, leaf in arrival_leaves([module])}


def is_distributed(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor."""
    return hasattr(parameter, "full_tensor")


def is_gathered(parameter: Tensor) -> bool:
    """Return whether a parameter's whole values have to be gathered by several ranks."""
    return is_distributed(parameter) or is_run(parameter) or part_of(parameter) is not None


def is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is gone, as that of FSDP1's views into a flat parameter is between forwards."""
    if tensor.layout is not torch.strided or tensor.is_meta or is_distributed(tensor):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def place_flat(module: nn.Module, leaf_of: Callable[[Tensor], Tensor]) -> None:
    """Put leaves, or views of a flat leaf, in the places of the parameters that FSDP1 has made parts of flat ones."""
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
    """Let FSDP1's modules call what they wrap, with inputs cast as they do it: parameters are whole and in place."""
    for module in modules:
        if is_fully_sharded(module):
            vars(module)["forward"] = plain_forward(module, _cast)


def replace_hooks(modules: Iterable[nn.Module]) -> None:
    """Replace FSDP2's hooks by ones that only cast as it does: parameters are whole, and nothing is to be reduced."""
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
