"""DataParallel for devices that are only simulated: the replicas run one after the other on the cpu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


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
        names, weights = zip(*self.module.named_parameters(), strict=True)
        copies = replicate(weights, len(shares))
        # The first replica works on the module's own buffers, in place; the others on copies from before that.
        begun = dict(self.module.named_buffers())
        buffers = [{}, *({name: buffer.clone() for name, buffer in begun.items()} for _ in shares[1:])]
        outputs = [
            functional_call(self.module, {**dict(zip(names, copy, strict=True)), **own}, share)
            for copy, own, share in zip(copies, buffers, shares, strict=True)
        ]
        return gather(outputs)


class Broadcast(torch.autograd.Function):
    """Identity to each of ``count`` replicas; backward sums what comes back from them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``count`` times the tensors, one replica after the other."""
        ctx.width = len(tensors)
        ctx.set_materialize_grads(False)  # a weight without a gradient keeps none
        return tuple(tensor.detach() for _ in range(count) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return for each tensor the sum of its replicas' gradients, None if no replica has one."""
        sums: list[Tensor | None] = [None]
        for index in range(ctx.width):
            parts = [part for part in gradients[index :: ctx.width] if part is not None]
            sums.append(sum(parts[1:], start=parts[0]) if parts else None)
        return tuple(sums)


def replicate(weights: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """Return ``count`` replicas of the weights; gradients flow back through them."""
    trained = [index for index, weight in enumerate(weights) if weight.requires_grad]
    copies = Broadcast.apply(count, *(weights[index] for index in trained)) if trained else ()
    replicas = []
    for number in range(count):
        replica = list(weights)
        for place, index in enumerate(trained):
            replica[index] = copies[number * len(trained) + place]
        replicas.append(tuple(replica))
    return replicas


def scatter(inputs: Any, count: int) -> list[Any]:
    """Split nested ``inputs`` along dim 0 of their tensors into at most ``count`` chunks.

    0-d tensors and everything that is not a tensor go to each chunk whole, as with DataParallel.

    Raises:
        ValueError: The tensors of one batch fall into different numbers of chunks.

    """
    chunks = {len(tensor.chunk(count)) for tensor in _tensors(inputs)}
    if len(chunks) > 1:
        raise ValueError(
            f"The tensors of a batch fall into {' and '.join(map(str, sorted(chunks)))} chunks over {count} "
            "devices: give all of them the same length in dim 0, the batch."
        )
    return _scatter(inputs, count, chunks.pop() if chunks else 1)


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
