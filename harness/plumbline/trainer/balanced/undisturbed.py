"""Runs something on a module and restores its buffers, its attributes and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.trainer.balanced.blocks import registered_buffers


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
