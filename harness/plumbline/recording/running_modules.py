"""The modules that run inside of a recorded call, so that observers know where in a model something happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from plumbline.recording.patching import attempt

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
