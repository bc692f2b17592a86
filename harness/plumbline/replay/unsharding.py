"""Replays of modules under ``fully_shard``: whole parameters in the places of shards, and FSDP's hooks out of the way.

Whole parameters are gathered by all ranks of a mesh together, so that every rank has to ask for them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.recording.sharding import arrival_leaves
from plumbline.recording.zero3 import is_hook_of_zero
from plumbline.replay.nested import map_tensors

_FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")


def shards(module: nn.Module) -> dict[int, Tensor]:
    """Return the sharded parameters of a module by the identities of their unsharded leaves."""
    return {id(leaf): shard for shard, leaf in arrival_leaves([module])}


def computing_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtypes in which sharded parameters are computed with, by the identities of the shards."""
    return {id(shard): leaf.dtype for shard, leaf in arrival_leaves([module])}


def is_distributed(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor."""
    return hasattr(parameter, "full_tensor")


def replace_hooks(modules: Iterable[nn.Module]) -> None:
    """Replace FSDP's hooks by ones that only cast as it does: parameters are whole, and nothing is to be reduced."""
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
    return str(name).startswith(_FSDP)


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
