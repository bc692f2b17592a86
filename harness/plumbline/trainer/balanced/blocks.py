"""A block that can be run by itself, the tensors it holds, and contexts that leave the module as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """A piece of the user's module.

    ``run(value, inputs)`` returns the nested tensors that are passed to the next block. ``value`` is what the previous
    block returned (``()`` for the first one), ``inputs`` the inputs of the whole module, of the same samples.
    """

    name: str  # qualified, in the user's module
    run: Callable[[Any, Any], Any]
    holds: tuple[str, ...]  # names of the module's parameters and buffers that it uses


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def registered_buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return for each buffer the dict it is registered in, its name there, and itself."""
    return [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


class Holder(nn.Module):
    """Calls a function while ``functional_call`` has replaced the tensors of the module that is held here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = module

    def forward(self, function: Any) -> Any:
        return function()


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the module's buffers and attributes and torch's random numbers afterwards.

    A step may count its calls, or keep a tensor for the next one; a trial must leave no trace. Of objects in
    attributes, only lists, sets and dicts are restored.
    """
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    attributes = [(vars(part), dict(vars(part)), _contents(part)) for part in module.modules()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for now, before, contents in attributes:
                now.clear()
                now.update(before)
                for container, items in contents:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(items)
            with torch.no_grad():
                for buffer, saved in values:
                    buffer.copy_(saved)


@contextmanager
def private_buffers(module: nn.Module) -> Iterator[None]:
    """Give a module copies of its buffers within the context, which it may change, in place or not.

    A buffer of another stage has one value for all of its elements, so no operation may change it in place.
    """
    entries = registered_buffers(module)
    copies: dict[int, Tensor] = {}
    for buffers, name, buffer in entries:
        buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for buffers, name, buffer in entries:
            buffers[name] = buffer


def _contents(part: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, type(value)(value)) for value in vars(part).values() if type(value) in (list, set, dict)]
