"""Blocks, the module calls of a user's step that can run alone, and contexts that restore the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.devices.calls import forked


@dataclass(frozen=True)
class Block:
    """A part of the user's module.

    ``run(value, inputs)`` returns the nested tensors that are passed to the next block. ``value`` is the previous
    block's result (``()`` for the first block), ``inputs`` the inputs of the whole module for the same samples.
    """

    name: str  # qualified name in the user's module
    run: Callable[[Any, Any], Any]
    holds: tuple[str, ...]  # names of the module's parameters and buffers that it uses


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def registered_buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return, for each buffer, the dict in which it is registered, its name there, and the buffer."""
    return [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


class Holder(nn.Module):
    """Holds a module and calls a function, for which ``functional_call`` can replace the module's tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = module

    def forward(self, function: Any) -> Any:
        return function()


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the module's buffers and attributes, and torch's random states, after the context.

    A step can count its calls or keep a tensor for the next step, but a trial must leave no trace. Only the contents of
    lists, sets and dicts in attributes are restored, not those of other objects.
    """
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    attributes = [(vars(part), dict(vars(part)), _contents(part)) for part in module.modules()]
    with forked([device]):
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
    """Replace a module's buffers with copies within the context, so that it can change them.

    All elements of another stage's buffer share one value in memory, so operations cannot change it in place.
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


@dataclass
class ModuleCall:
    """One call of a module in a step, and the calls within it."""

    module: nn.Module
    name: str
    inner: list[ModuleCall] = field(default_factory=list)


def record_calls(module: nn.Module, step: Callable[[], Any]) -> list[ModuleCall]:
    """Run ``step`` and return its direct module calls, in order."""
    open_calls = [ModuleCall(module, "")]

    def enter(name: str) -> Callable[..., None]:
        def note(called: nn.Module, inputs: Any) -> None:
            call = ModuleCall(called, name)
            open_calls[-1].inner.append(call)
            open_calls.append(call)

        return note

    def leave(called: nn.Module, inputs: Any, outputs: Any) -> None:
        open_calls.pop()

    handles = []
    for name, part in module.named_modules():
        handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return open_calls[0].inner


def open_up(calls: Sequence[ModuleCall], largest: float) -> list[ModuleCall]:
    """Replace the calls of Sequentials, and of modules with more than ``largest`` weights, by their inner calls."""
    opened = []
    for call in calls:
        weights = sum(parameter.numel() for parameter in call.module.parameters())
        if call.inner and (isinstance(call.module, nn.Sequential) or weights > largest):
            opened += open_up(call.inner, largest)
        else:
            opened.append(call)
    return opened


def calls_of(calls: Sequence[ModuleCall], blocks: Sequence[nn.Module]) -> list[ModuleCall]:
    chosen = {id(block) for block in blocks}
    found = []
    for call in calls:
        found += [call] if id(call.module) in chosen else calls_of(call.inner, blocks)
    return found


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module], stand_in: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace each module's forward within the context by ``stand_in(module, forward)``."""
    different = {id(module): module for module in modules}.values()
    previous = [(module, module.__dict__.get("forward")) for module in different]
    for module in different:
        module.forward = stand_in(module, module.forward)
    try:
        yield
    finally:
        for module, own in previous:
            if own is None:
                del module.forward
            else:
                module.forward = own
