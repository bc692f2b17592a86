"""Replaces a call's outputs by aliases, at which only gradients from outside of the call arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plumbline.replay.call import TrackedCall

Receive = Callable[[TrackedCall, "tuple[Tensor | None, ...]"], None]


class CallOutputs(torch.autograd.Function):
    """The autograd node between the outputs of a tracked call and everything that is computed from them.

    Its outputs share their memory with its inputs, but are not views for autograd, so the script can write to them.
    ``node.call`` is the call, ``node.arguments`` are the nodes that computed its arguments, ``node.sizes_of_outputs``
    the numbers of the outputs' entries.
    """

    @staticmethod
    def forward(ctx: Any, call: TrackedCall, arguments: tuple[Any, ...], receive: Receive, *outputs: Tensor) -> Any:
        """Return new tensors that share the memory of the outputs."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.arguments, ctx.receive = call, arguments, receive
        ctx.sizes_of_outputs = [one.numel() for one in outputs]
        return tuple(one.detach() for one in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Note the gradients, and pass them on."""
        ctx.receive(ctx.call, cotangents)
        return (None, None, None, *cotangents)


def alias(call: TrackedCall, arguments: tuple[Any, ...], receive: Receive, outputs: list[Tensor]) -> list[Tensor]:
    """Return aliases of a call's outputs; ``receive`` gets the gradients that arrive at them in each backward pass."""
    return list(CallOutputs.apply(call, arguments, receive, *outputs))  # type: ignore[no-untyped-call]
