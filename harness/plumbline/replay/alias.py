"""Outputs as aliases: the gradient that arrives at them comes from outside of the call, whatever is used inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plumbline.replay.call import TrackedCall

Receive = Callable[[TrackedCall, "tuple[Tensor | None, ...]"], None]


class CallOutputs(torch.autograd.Function):
    """The node of the graph between the outputs of a tracked call and everything that is computed from them.

    Its outputs share their memory with its inputs, and are no views for autograd: the script may write to them.
    ``node.call`` is the call, ``node.arguments`` the nodes that computed its arguments.
    """

    @staticmethod
    def forward(ctx: Any, call: TrackedCall, arguments: tuple[Any, ...], receive: Receive, *outputs: Tensor) -> Any:
        """Return the outputs as other tensors with the same memory."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.arguments, ctx.receive = call, arguments, receive
        return tuple(one.detach() for one in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Pass the gradients on, and note them."""
        ctx.receive(ctx.call, cotangents)
        return (None, None, None, *cotangents)


def alias(call: TrackedCall, arguments: tuple[Any, ...], receive: Receive, outputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a call as aliases; ``receive`` gets what arrives at them in each backward pass."""
    return list(CallOutputs.apply(call, arguments, receive, *outputs))  # type: ignore[no-untyped-call]
