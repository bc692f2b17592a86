"""Walks nested values to find every tensor in the arguments or the output of a module.

Lists, tuples, dicts, dataclasses, the outputs of model libraries and plain objects are walked; sets, modules, functions
and classes are not.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

DEEPEST = 12
"""The number of container levels that are walked. Deeper values are passed on unchanged."""

_CLOSED = (
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Generator,
    torch.Size,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)

Change = Callable[[Tensor], Any]


def map_tensors(value: Any, change: Change) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)``, which is called once for each tensor.

    Containers that hold a changed tensor are copied; all others are passed on unchanged.
    """
    return _map(value, change, {}, 0)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``value`` once, always in the same order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return iter(found)


def _map(value: Any, change: Change, known: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if isinstance(value, _CLOSED) or depth > DEEPEST:
        return value
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = (value, value)  # for containers that hold themselves; the reference keeps the id unique
    result = change(value) if isinstance(value, Tensor) else _container(value, change, known, depth + 1)
    known[id(value)] = (value, result)
    return result


def _container(value: Any, change: Change, known: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_map(part, change, known, depth) for part in value]
        return value if _same(parts, value) else _sequence(value, parts)
    if isinstance(value, dict):
        changed = {key: _map(part, change, known, depth) for key, part in value.items()}
        return value if _same(changed.values(), value.values()) else _dictionary(value, changed)
    if not isinstance(getattr(value, "__dict__", None), dict):
        return value
    changed = {key: _map(part, change, known, depth) for key, part in vars(value).items()}
    if _same(changed.values(), vars(value).values()):
        return value
    result = copy.copy(value)
    vars(result).update(changed)
    return result


def _sequence(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else _as_type(tuple(parts), value)
    if type(value) is list:
        return parts
    result = copy.copy(value)
    result[:] = parts
    return result


def _as_type(parts: tuple[Any, ...], value: tuple[Any, ...]) -> Any:
    return parts if type(value) is tuple else type(value)(parts)


def _dictionary(value: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return changed
    result = copy.copy(value)  # keeps a default factory, and the class of a library's output
    for key, part in changed.items():
        if part is not value[key]:
            result[key] = part
    return result


def _same(parts: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(parts, others, strict=True))
