"""Watches how a forward selects the largest of several scores, as the routers of experts do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plumbline.recording.patching import attempt, undone_by, wrap

_PLACES = {"topk": 2, "argmax": 1, "max": 1}
"""The place of the dimension among the arguments of the functions that select."""

Selected = Callable[[Tensor, Tensor], None]
"""Takes scores (…, choices), and the indices (…, k) that were selected in the last dimension."""


_WATCHING: list[Selected] = []


@contextmanager
def watch_selections(selected: Selected) -> Iterator[None]:
    """Tell ``selected`` of each selection along the last dimension inside the block, outside of compiled code."""
    _WATCHING.append(selected)
    try:
        yield
    finally:
        _WATCHING.remove(selected)


def install_watch() -> None:
    """Wrap the functions of torch that select."""
    for owner in (torch, torch.Tensor):
        for name in _PLACES:
            wrap(owner, name, partial(_around, name))
    for name in _PLACES:
        attempt(_known_to_scripts, name)


def _around(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if _WATCHING and not torch.compiler.is_compiling():
        attempt(_follow, name, args, kwargs, result)
    return result


def _follow(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    scores = args[0] if args else kwargs.get("input")
    if type(scores) is not Tensor or not scores.is_floating_point() or scores.dim() < 2:
        return
    default = -1 if name == "topk" else None
    dim = kwargs["dim"] if "dim" in kwargs else args[_PLACES[name]] if len(args) > _PLACES[name] else default
    if type(dim) is not int or dim % scores.dim() != scores.dim() - 1:
        return
    indices = result if name == "argmax" else result[1]
    for selected in _WATCHING:
        selected(scores, indices if indices.dim() == scores.dim() else indices.unsqueeze(-1))


def _known_to_scripts(name: str) -> None:
    """Let the TorchScript compiler take the wrapper for the same operator as torch's own function."""
    builtins: Any = torch.jit._builtins
    function = getattr(torch, name)
    builtins._register_builtin(function, f"aten::{name}")
    # The table knows functions by their ids: once this one is freed, another may have the same.
    undone_by(lambda: builtins._get_builtin_table().pop(id(function), None))
