"""Follows module calls without changing how code is compiled, and which modules run inside of a recorded call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plumbline.recording.patching import attempt

Run = Callable[..., Any]
"""The original ``torch.nn.Module.__call__``."""

Called = Callable[[Run, nn.Module, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""Runs a module with ``run(module, *args, **kwargs)`` and returns its output."""


class ModuleCalls:
    """Routes the calls of modules through ``called``, except inside of regions that TorchDynamo compiles.

    TorchDynamo treats modules with the original ``__call__`` specially, so it is made to take the replacement for the
    original. It neither traces nor guards the replacement.
    """

    def __init__(self, called: Called) -> None:
        self._original = original = nn.Module.__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling() or _is_evaluated_by_dynamo():
                return original(module, *args, **kwargs)
            return called(original, module, args, kwargs)

        self._own = __call__
        _leave_uncompiled(__call__)
        _leave_uncompiled(_is_evaluated_by_dynamo)

    def install(self) -> None:
        self._replace(self._original, self._own)

    def remove(self) -> None:
        """Restore ``Module.__call__``, unless other code has replaced it since."""
        self._replace(self._own, self._original)

    @staticmethod
    def _replace(old: Any, new: Any) -> None:
        if nn.Module.__call__ is old:
            nn.Module.__call__ = new  # type: ignore[method-assign]
        for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
            known: Any = sys.modules.get(name)
            if getattr(known, "unpatched_nn_module_call", None) is old:
                known.unpatched_nn_module_call = new


def _is_evaluated_by_dynamo() -> bool:
    """Return whether TorchDynamo evaluates each function that is called now, and may compile it."""
    dynamo: Any = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "get_eval_frame_callback"):
        callback = dynamo.get_eval_frame_callback()
    else:  # before torch 2.5
        callback = dynamo.set_eval_frame(None)
        dynamo.set_eval_frame(callback)
    return callback is not None and callback is not False


def _leave_uncompiled(function: Any) -> None:
    """Tell TorchDynamo to skip a function, but to evaluate the functions that it calls."""
    dynamo: Any = torch._C._dynamo.eval_frame  # torch._dynamo has the same, but takes a second to import
    if hasattr(dynamo, "skip_code"):  # before torch 2.7
        dynamo.skip_code(function.__code__)
        return
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, default))


Ended = Callable[["tuple[Any, ...]", Any], None]
"""Called with the positional arguments of a call and its output."""


@dataclass(eq=False)
class RunningModule:
    """A module while it runs; ``when_ended`` are called with its positional arguments and its output."""

    module: nn.Module
    when_ended: list[Ended] = field(default_factory=list)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[RunningModule] = []


_THREAD = _Thread()


def running_modules() -> tuple[RunningModule, ...]:
    """Return the modules that run on this thread inside of a recorded call, the outermost first."""
    return tuple(_THREAD.running)


def run_noted(run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module; ``running_modules`` includes it meanwhile."""
    one = RunningModule(module)
    _THREAD.running.append(one)
    try:
        output = run(module, *args, **kwargs)
    finally:
        _THREAD.running.pop()
    for ended in one.when_ended:
        attempt(ended, args, output)
    return output
