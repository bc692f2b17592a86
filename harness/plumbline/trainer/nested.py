"""Maps, counts, splits and joins nested dicts, lists and tuples of tensors, such as batches and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return _like(value, items)
    return value


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def batch_length(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor that is neither 0-d nor empty."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim() and len(tensor)), 0)


def scatter(inputs: Any, count: int) -> Sequence[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    As with DataParallel, each chunk gets 0-d tensors and other values whole.
    """
    first = next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)
    return _scatter(inputs, count, 1 if first is None else _chunks(first.shape[0], count))


def _chunks(length: int, count: int) -> int:
    """Return the number of chunks that ``torch.chunk(count)`` makes. All but the last have the same length."""
    return -(-length // -(-length // count)) if length else count


def _scatter(value: Any, count: int, chunks: int) -> Sequence[Any]:
    if isinstance(value, Tensor):
        if not value.dim():
            return [value] * chunks
        parts = value.chunk(count)
        if len(parts) != chunks:
            raise ValueError(
                f"The tensors of a batch split into different numbers of chunks, {min(chunks, len(parts))} and "
                f"{max(chunks, len(parts))}, over {count} devices: give all of them the same length in dim 0, the "
                "batch."
            )
        return parts
    if isinstance(value, dict):
        columns = [_scatter(item, count, chunks) for item in value.values()]
        return [type(value)(zip(value, part, strict=True)) for part in _rows(columns, chunks)]
    if isinstance(value, (list, tuple)):
        columns = [_scatter(item, count, chunks) for item in value]
        return [_like(value, part) for part in _rows(columns, chunks)]
    return [value] * chunks


def _rows(columns: list[Sequence[Any]], chunks: int) -> Iterable[tuple[Any, ...]]:
    return zip(*columns, strict=True) if columns else [()] * chunks


def gather(outputs: list[Any]) -> Any:
    """Concatenate the replicas' nested outputs along dim 0, and stack 0-d tensors to a vector.

    Other values are returned unchanged if all replicas have the same object, else as a list.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, dict):
        return type(first)([(key, gather([output[key] for output in outputs])) for key in first])
    if isinstance(first, (list, tuple)):
        return _like(first, [gather(list(part)) for part in zip(*outputs, strict=True)])
    return first if all(output is first for output in outputs) else list(outputs)


def _like(value: Any, items: Any) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
