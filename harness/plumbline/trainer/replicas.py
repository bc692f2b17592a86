"""DataParallel for devices that are only simulated: the replicas run one after the other on the cpu."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Replicas(nn.Module):
    """A drop-in for ``torch.nn.DataParallel`` over ``count`` simulated devices.

    Inputs are split along dim 0 with ``torch.chunk``, outputs gathered along dim 0. As with DataParallel the
    module is called once a replica (its hooks fire each time), and its buffers after the call are those of
    the first one.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        self.count = count

    def forward(self, *inputs: Any) -> Any:
        """Return the gathered outputs of ``module(*inputs)`` over the chunks of the inputs."""
        shares = scatter(inputs, self.count)
        module: Any = self._modules["module"]  # self.module would cost 1 µs
        replicas = replicate(module, len(shares))
        return gather([replica(*share) for replica, share in zip(replicas, shares, strict=True)])


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Return ``count`` replicas: shallow copies, with the module's hooks and its weights, whose gradients add up.

    The first has the module's own buffers too, so what it does to one in place stays; the others begin with copies of
    these. What a forward assigns to an attribute is lost with its replica, as with DataParallel.
    """
    layers: list[nn.Module] = []
    _note_changeable(module, layers, {})
    buffers = [buffer for layer in layers for buffer in layer._buffers.values() if buffer is not None]
    replicas = [_replica(module, layers, {})]
    for _ in range(count - 1):
        replicas.append(_replica(module, layers, {id(buffer): buffer.clone() for buffer in buffers}))
    return replicas


def _note_changeable(layer: nn.Module, found: list[nn.Module], seen: dict[int, bool]) -> bool:
    """Note the layers that a forward may change, and after them those above; return whether this is one.

    Of torch's own those are the ones with buffers, recurrent ones, and where a hook could do anything.
    """
    key = id(layer)
    known = seen.get(key)
    if known is None:
        own = layer.__dict__
        kind: Any = type(layer)
        known = bool(
            _may_assign(kind)
            or own["_buffers"]
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        )
        for child in own["_modules"].values():
            if child is not None and _note_changeable(child, found, seen):
                known = True
        if known:
            found.append(layer)
        seen[key] = known
    return known


@cache
def _may_assign(kind: Any) -> bool:
    return not kind.__module__.startswith("torch.nn.modules.") or _replicates_by_itself(kind)


@cache
def _replicates_by_itself(kind: Any) -> bool:
    return bool(kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel)


def _replica(module: nn.Module, layers: list[nn.Module], copies: dict[int, Tensor]) -> nn.Module:
    """Return a shallow copy with copies of these layers below it, and of the buffers that ``copies`` has by id."""
    made: dict[int, nn.Module] = {}
    for layer in layers:
        theirs = layer.__dict__
        kind: Any = type(layer)
        if _replicates_by_itself(kind):
            # Recurrent layers keep their weights in a list as well.
            replica = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            own = replica.__dict__
        else:
            # What that does, without asking of each attribute what kind of thing it is: 1 µs a layer, not 12.
            replica = object.__new__(type(layer))
            own = theirs.copy()
            object.__setattr__(replica, "__dict__", own)
        own["_is_replica"] = True
        own["_parameters"] = theirs["_parameters"].copy()
        buffers = theirs["_buffers"]
        own["_buffers"] = {name: copies.get(id(one), one) for name, one in buffers.items()} if buffers else {}
        own["_modules"] = below = {name: made.get(id(child), child) for name, child in theirs["_modules"].items()}
        own.update(below)  # as attributes they are found without Module.__getattr__, in a tenth of the time
        made[id(layer)] = replica
    return made.get(id(module), module)


def scatter(inputs: Any, count: int) -> Sequence[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    0-d tensors and everything that is not a tensor go to each chunk whole, as with DataParallel.

    Raises:
        ValueError: The tensors of one batch fall into different numbers of chunks.

    """
    first = _first_tensor(inputs)
    return _scatter(inputs, count, 1 if first is None else _chunks(first.shape[0], count))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    for item in value:
        found = _first_tensor(item)
        if found is not None:
            return found
    return None


def _chunks(length: int, count: int) -> int:
    """Return how many ``torch.chunk(count)`` makes of so many samples: they are all as long, but for the last."""
    return -(-length // -(-length // count)) if length else count


def _scatter(value: Any, count: int, chunks: int) -> Sequence[Any]:
    if isinstance(value, Tensor):
        if not value.dim():
            return [value] * chunks
        parts = value.chunk(count)
        if len(parts) != chunks:
            raise ValueError(
                f"The tensors of a batch fall into {min(chunks, len(parts))} and {max(chunks, len(parts))} chunks over "
                f"{count} devices: give all of them the same length in dim 0, the batch."
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
    """Join the replicas' nested outputs along dim 0; their 0-d tensors become a vector.

    What is not a tensor comes back as it is where all replicas hold the same object, else as a list.
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
    """Return ``items`` as the kind of list, tuple or named tuple that ``value`` is."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
