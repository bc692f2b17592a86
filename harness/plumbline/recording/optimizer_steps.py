"""Follows the steps of all optimizers of this process."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol

import torch
import torch._compile
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plumbline.recording.parameters import is_container
from plumbline.recording.patching import undone_by
from plumbline.recording.pause import is_paused

_STEPS_IN = Optimizer.profile_hook_step.__code__.co_filename
"""The file of the wrapper of every optimizer's ``step``, which calls the hooks."""


class StepListener(Protocol):
    """Is notified of each step. ``gradients_ready``: the gradients are final for this step.

    If a step has a closure, it is called after each run of the closure.
    """

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None: ...

    def gradients_ready(self, optimizer: Optimizer) -> None: ...

    def step_ends(self, optimizer: Optimizer) -> None: ...


class OptimizerSteps:
    """Notifies a listener of optimizer steps from ``install`` on, except while ``paused``.

    If an optimizer wraps another one, the listener is notified only of the outer step. ``begun`` counts both. If an
    optimizer is a container, the listener is notified of the steps of the optimizers in it.
    """

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self._running: list[Optimizer] = []
        self.begun = 0

    def install(self, *, outside_graphs: bool = False) -> None:
        """Register the hooks. They are never removed inside of a step, because torch iterates over all hooks there.

        ``outside_graphs`` keeps them outside of the graph of a compiled step, which costs 2 µs per step.
        """
        wrap: Any = torch._compile._disable_dynamo if outside_graphs else lambda hook: hook
        undone_by(register_optimizer_step_pre_hook(wrap(lambda *args: self.before(*args))).remove)
        undone_by(register_optimizer_step_post_hook(wrap(lambda *args: self.after(*args))).remove)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Note the beginning of a step. If it has a closure, return arguments with a closure that is followed."""
        if is_paused() or is_container(optimizer) or not self._enter(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._listener.step_begins(optimizer, has_closure=closure is not None)
        if closure is None:
            self._listener.gradients_ready(optimizer)
            return None

        def followed() -> Any:
            loss = closure()
            self._listener.gradients_ready(optimizer)
            return loss

        # Lightning computes the gradients in the closure.
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_paused() and not is_container(optimizer) and self._leave(optimizer):
            self._listener.step_ends(optimizer)

    def _enter(self, optimizer: Optimizer) -> bool:
        """Return whether the step that begins is the outermost one."""
        self.begun += 1
        if self._running:  # or these steps have raised, which calls no hook
            on_stack = _stepping()
            self._running = [one for one in self._running if any(one is other for other in on_stack)]
        self._running.append(optimizer)
        return len(self._running) == 1

    def _leave(self, optimizer: Optimizer) -> bool:
        """Return whether the step that ends is the outermost one."""
        while self._running and self._running.pop() is not optimizer:
            pass
        return not self._running


def _stepping() -> list[object]:
    """Return the optimizers whose steps are on the stack of this thread, except the step that begins."""
    found: list[object] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _STEPS_IN:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found[1:]
