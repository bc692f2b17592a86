"""A block that can be run by itself, the tensors it holds, and contexts in which to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.trainer.precision_plugins import map_tensors


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
    """Return the parameters and buffers of a module by name, shared ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples, in order."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random number generators of the CPU and all devices afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


def registered_buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return for each buffer the dict it is registered in, its name there, and itself."""
    return [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]


class Holder(nn.Module):
    """Calls a function while ``functional_call`` has replaced the tensors of the modules that are held here."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, function: Any) -> Any:
        return function()
