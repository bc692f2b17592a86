"""Runs something on a module and leaves the module as it was: its buffers, its attributes, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run something and leave the module's buffers and attributes and torch's random numbers as they were.

    A step may count what it has seen, or keep a tensor for the next one: none of it is from a trial. What is inside of
    an object in an attribute is not looked at, but for lists, sets and dicts.
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
    """Give a module copies of its buffers for as long as the context lasts: it may change them, in place or not.

    A buffer of another stage has one value for all of its elements: no operation may change that in place.
    """
    entries = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
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
