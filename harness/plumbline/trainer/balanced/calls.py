"""The module calls of a user's step: those that become blocks, and how to replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class ModuleCall:
    """One call of a module in a step, and the calls inside it."""

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
    """Replace containers by their inner calls: each Sequential, and modules with more than ``largest`` weights."""
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
    """Replace each module's forward by what ``stand_in`` returns for it."""
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
