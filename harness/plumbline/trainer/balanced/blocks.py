"""A block that can be run by itself, the tensors it holds, and how to run it without a trace."""

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

    ``run(value, inputs)`` returns what travels to the next block, nested tensors: ``value`` is what the block before
    returned, ``inputs`` what the whole module is given, of the same samples. Of the first block that is ``()``.
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
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leave the random number generators of the cpu and all devices as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of training or evaluation, and give each module below its own mode back."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Holder(nn.Module):
    """Calls a function while ``functional_call`` has put other tensors into the modules that are held here."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, function: Any) -> Any:
        """Return what the function returns."""
        return function()
