"""Repeats the random draws of a replay's forward in modules that its backward pass runs again."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plumbline.recording.backward_passes import in_backward
from plumbline.replay.nested import tensors_in
from plumbline.replay.random_state import RandomState


class DrawsInBackwardError(Exception):
    """A backward pass draws random numbers outside of the modules that it runs again."""


class ForwardDraws:
    """Saves the generators' states when a module runs in the forward, and sets them when a backward pass runs it again.

    A hand-written activation checkpoint has to do the same. A module that runs several times in the forward is left
    alone, because it is unknown which of its runs is repeated.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Module, RandomState | None] = {}
        self._running: list[nn.Module] = []
        self._outside: RandomState | None = None
        self._handles: list[Any] = []

    @property
    def repeats(self) -> bool:
        """Whether a module is running again with the states of its forward."""
        return self._outside is not None

    def __enter__(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            known = module in self._states
            self._states[module] = None if known else _now(module, args)
            return
        state = self._states.get(module)
        if not self._running and state is not None:
            self._outside = _now(module, args)
            state.set()
        self._running.append(module)

    def _ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward() and self._running:
            self._running.pop()
            if not self._running and self._outside is not None:
                self._outside.set()
                self._outside = None


def _now(module: nn.Module, args: tuple[Any, ...]) -> RandomState:
    return RandomState.now(one.device for one in (*tensors_in(args), *module.parameters()))
