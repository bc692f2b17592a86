"""Keeps an observer's error to itself: the others go on, and its own question is not answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observer import Observer

T = TypeVar("T")


class GuardedObserver(Observer):
    """Passes everything on to another observer until that raises. Its last facts say why, as ``error``."""

    def __init__(self, observer: Observer) -> None:
        self.name = observer.name
        self._observer = observer
        self._error = ""

    def install(self) -> None:
        """Install the observer's patches."""
        self._do(self._observer.install)

    def first_step(self, optimizer: Optimizer) -> None:
        """Pass the beginning of an optimizer's first step on."""
        self._do(lambda: self._observer.first_step(optimizer))

    def start(self) -> None:
        """Begin to record."""
        self._do(self._observer.start)

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass a forward on."""
        self._do(lambda: self._observer.forward_begins(module, args, kwargs))

    def forward_ends(self) -> None:
        """Pass the end of a forward on."""
        self._do(self._observer.forward_ends)

    def runs_again(self, module: nn.Module) -> None:
        """Pass on that a module runs again."""
        self._do(lambda: self._observer.runs_again(module))

    def backward_begins(self, number: int) -> None:
        """Pass the beginning of a backward pass on."""
        self._do(lambda: self._observer.backward_begins(number))

    def backward_ends(self, number: int) -> Facts | None:
        """Return the observer's facts about a backward pass."""
        return self._do(lambda: self._observer.backward_ends(number))

    def before_step(self, optimizer: Optimizer) -> None:
        """Pass the beginning of a step on."""
        self._do(lambda: self._observer.before_step(optimizer))

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return the observer's facts about a step."""
        return self._do(lambda: self._observer.after_step(optimizer, skipped=skipped))

    def stop(self) -> None:
        """End recording, also after an error: the observer lets go of what it holds."""
        error, self._error = self._error, ""
        self._do(self._observer.stop)
        self._error = error or self._error

    def final_facts(self) -> Facts | None:
        """Return the observer's facts about the process, and its error."""
        facts = self._do(self._observer.final_facts)
        return {**(facts or {}), "error": self._error} if self._error else facts

    def after_recording(self, write: Callable[[], None]) -> None:
        """Let the observer go on."""
        self._do(lambda: self._observer.after_recording(write))

    def _do(self, what: Callable[[], T]) -> T | None:
        if self._error:
            return None
        try:
            return what()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            return None
