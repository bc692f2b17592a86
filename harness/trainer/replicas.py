"""DataParallel for devices that are only simulated: the replicas run one after the other on the cpu."""

from __future__ import annotations

from collections.abc import Iterator
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
    layers = list(_layers(module, {}).values())
    replicas = [_replica(layers, {})]
    for _ in range(count - 1):
        copies = {id(one): one.clone() for layer in layers for one in layer._buffers.values() if one is not None}
        replicas.append(_replica(layers, copies))
    return replicas


def _layers(module: nn.Module, found: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """Return the module, and all below it, by their ids."""
    if id(module) not in found:
        found[id(module)] = module
        for child in module._modules.values():
            if child is not None:
                _layers(child, found)
    return found


def _replica(layers: list[nn.Module], copies: dict[int, Tensor]) -> nn.Module:
    """Return a shallow copy of the first layer, which has the others below it, with ``copies`` of buffers by id."""
    made = {id(layer): _shallow(layer, copies) for layer in layers}
    for layer in layers:
        if layer._modules:
            below = {name: child if child is None else made[id(child)] for name, child in layer._modules.items()}
            made[id(layer)].__dict__["_modules"] = below
    return made[id(layers[0])]


def _shallow(layer: nn.Module, copies: dict[int, Tensor]) -> nn.Module:
    own = {
        "_parameters": dict(layer._parameters),
        "_buffers": {name: copies.get(id(one), one) for name, one in layer._buffers.items()},
        "_is_replica": True,
    }
    if type(layer)._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        # Recurrent layers keep their weights in a list as well.
        replica = layer._replicate_for_data_parallel()
        replica.__dict__.update(own)
        return replica
    # What that does, without asking of each attribute what kind of thing it is: 1 µs a layer, not 12.
    replica = object.__new__(type(layer))
    object.__setattr__(replica, "__dict__", {**layer.__dict__, **own})
    return replica


def scatter(inputs: Any, count: int) -> list[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    0-d tensors and everything that is not a tensor go to each chunk whole, as with DataParallel.

    Raises:
        ValueError: The tensors of one batch fall into different numbers of chunks.

    """
    chunks = {_chunks(len(tensor), count) for tensor in _tensors(inputs)}
    if len(chunks) > 1:
        raise ValueError(
            f"The tensors of a batch fall into {' and '.join(map(str, sorted(chunks)))} chunks over {count} "
            "devices: give all of them the same length in dim 0, the batch."
        )
    return _scatter(inputs, count, chunks.pop() if chunks else 1)


def _chunks(length: int, count: int) -> int:
    """Return into how many chunks ``torch.chunk`` cuts a tensor: all but the last are of one size."""
    return -(-length // -(-length // count)) if length else len(torch.empty(0).chunk(count))


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


def _scatter(value: Any, count: int, chunks: int) -> list[Any]:
    if isinstance(value, Tensor) and value.dim():
        return list(value.chunk(count))
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
