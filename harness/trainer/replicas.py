"""DataParallel for devices that are only simulated: the replicas run one after the other on the cpu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        return gather(
            [replica(*share) for replica, share in zip(replicate(self.module, len(shares)), shares, strict=True)]
        )


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Return ``count`` replicas: shallow copies, with the module's hooks and its weights, whose gradients add up.

    The first has the module's own buffers too, so what it does to one in place stays; the others begin with copies of
    these. What a forward assigns to an attribute is lost with its replica, as with DataParallel.
    """
    layers: dict[int, nn.Module] = {}
    _note_changeable(module, layers, set())
    replicas = [_replica(module, layers, {})]
    for _ in range(count - 1):
        buffers = (one for layer in layers.values() for one in layer._buffers.values() if one is not None)
        replicas.append(_replica(module, layers, {id(one): one.clone() for one in buffers}))
    return replicas


def _note_changeable(layer: nn.Module, found: dict[int, nn.Module], seen: set[int]) -> bool:
    """Note, by their ids, the layers that a forward may change, and those above them; say whether this is one.

    Of torch's own those are the ones with buffers, recurrent ones, and where a hook could do anything.
    """
    key = id(layer)
    if key not in seen:
        seen.add(key)
        hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
        changeable = _may_assign(type(layer)) or layer._buffers or hooks
        for child in layer._modules.values():
            if child is not None and _note_changeable(child, found, seen):
                changeable = True
        if changeable:
            found[key] = layer
    return key in found


@cache
def _may_assign(kind: type[nn.Module]) -> bool:
    return not kind.__module__.startswith("torch.nn.modules.") or _replicates_by_itself(kind)


def _replicates_by_itself(kind: type[nn.Module]) -> bool:
    return kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel


def _replica(module: nn.Module, layers: dict[int, nn.Module], copies: dict[int, Tensor]) -> nn.Module:
    """Return a shallow copy with copies of these layers below it, and of the buffers that ``copies`` has by id."""
    made = {key: _shallow(layer, copies) for key, layer in layers.items()}
    for replica in made.values():
        below = replica.__dict__["_modules"]
        replica.__dict__["_modules"] = {name: made.get(id(child), child) for name, child in below.items()}
    return made.get(id(module), module)


def _shallow(layer: nn.Module, copies: dict[int, Tensor]) -> nn.Module:
    if _replicates_by_itself(type(layer)):
        replica = layer._replicate_for_data_parallel()  # recurrent layers keep their weights in a list as well
    else:
        # What that does, without asking of each attribute what kind of thing it is: 1 µs a layer, not 12.
        replica = object.__new__(type(layer))
        object.__setattr__(replica, "__dict__", layer.__dict__.copy())
        replica.__dict__["_is_replica"] = True
    replica.__dict__["_parameters"] = layer._parameters.copy()
    replica.__dict__["_buffers"] = {name: copies.get(id(one), one) for name, one in layer._buffers.items()}
    return replica


def scatter(inputs: Any, count: int) -> Sequence[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    0-d tensors and everything that is not a tensor go to each chunk whole, as with DataParallel.

    Raises:
        ValueError: The tensors of one batch fall into different numbers of chunks.

    """
    first = next(_tensors(inputs), None)
    return _scatter(inputs, count, 1 if first is None else len(first.chunk(count)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _scatter(value: Any, count: int, chunks: int) -> Sequence[Any]:
    if isinstance(value, Tensor) and value.dim():
        parts = value.chunk(count)
        if len(parts) != chunks:
            raise ValueError(
                f"The tensors of a batch fall into {min(chunks, len(parts))} and {max(chunks, len(parts))} chunks over "
                f"{count} devices: give all of them the same length in dim 0, the batch."
            )
        return parts
    if isinstance(value, dict):
        parts = (
            zip(*(_scatter(item, count, chunks) for item in value.values()), strict=True) if value else [()] * chunks
        )
        return [type(value)(zip(value, part, strict=True)) for part in parts]
    if isinstance(value, (list, tuple)):
        parts = zip(*(_scatter(item, count, chunks) for item in value), strict=True) if value else [()] * chunks
        return [_like(value, part) for part in parts]
    return [value] * chunks


def gather(outputs: list[Any]) -> Any:
    """Join the replicas' nested outputs along dim 0; their 0-d tensors become a vector.

    What is not a tensor comes back as it is where all replicas hold the same object, else as a list.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.dim() else torch.stack(outputs)
    if isinstance(first, dict):
        return type(first)((key, gather([output[key] for output in outputs])) for key in first)
    if isinstance(first, (list, tuple)):
        return _like(first, [gather(list(part)) for part in zip(*outputs, strict=True)])
    return first if all(output is first for output in outputs) else list(outputs)


def _like(value: Any, items: Any) -> Any:
    """Return ``items`` as the kind of list, tuple or named tuple that ``value`` is."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
