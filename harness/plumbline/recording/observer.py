"""Observers, which note facts while the user's script runs, and change nothing.

Errors of observers that are not essential are isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.recording.pause import is_paused

Facts = dict[str, Any]
"""Noted facts by name, as JSON values."""


class Observer:
    """Notes facts about a training. All methods are optional, and are called on the thread that trains.

    ``name`` is the key of the observer's facts in the evidence of a step and of the process. Steps are recorded between
    ``start`` and ``stop``; at other times an observer must cost no time. An exception in an ``essential`` observer ends
    recording; in another observer, it ends only the notes of that observer. The script continues.
    """

    name: str
    essential = False
    recording = False

    @property
    def attends(self) -> bool:
        """Whether the script itself is running, and is being recorded."""
        return self.recording and not is_paused()

    def install(self) -> None:
        """Install lasting patches. This is called once, after torch is imported and before the script uses it."""

    def found(self, one: Any) -> None:
        """The script has created ``one``, an object of any type, before recording was installed."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """The script has created an optimizer, or steps one whose creation was not seen, recorded or not."""

    def first_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to take its very first step, recorded or not."""

    def start(self) -> None:
        """Recording begins, perhaps in the middle of a script, between two optimizer steps."""
        self.recording = True

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module that holds parameters is called, with gradients enabled."""

    def constant_called(self, module: nn.Module) -> None:
        """An outermost module is called whose outputs have no gradient."""

    def forward_ends(self) -> None:
        """The most recent call of an outermost module has returned."""

    def runs_again(self, module: nn.Module) -> None:
        """A backward pass runs a module of a recorded forward again, as checkpoints do."""

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """The backward pass with this number begins, at these tensors."""

    def backward_ends(self, number: int) -> Facts | None:
        """The backward pass with this number has ended; the returned facts are added to its facts."""
        return None

    def before_replay(self, call: Any, exact: Any, native: Any) -> None:
        """A recorded call is about to be replayed, before its optimizer steps.

        ``exact`` and ``native`` have the copies of parameters for replays in the two precisions.
        """

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, with the current gradients and weights."""

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """An optimizer has stepped, or the GradScaler has skipped it; the returned facts are the step's."""
        return None

    def stop(self) -> None:
        """Recording ends."""
        self.recording = False

    def final_facts(self) -> Facts | None:
        """Return the facts about the whole process, when it ends or as soon as evidence is written."""
        return None

    def after_recording(self, write: Callable[[], None]) -> None:
        """The recorded steps have been written, and the script continues.

        An observer that still watches calls ``write`` whenever its final facts have changed.
        """


class WrappingObserver(Observer):
    """An observer that wraps functions of torch. It takes notes between ``start`` and ``stop``, until it fails.

    ``error`` says why it takes no more notes, "" while it does.
    """

    essential = True

    def __init__(self) -> None:
        self.error = ""

    def final_facts(self) -> Facts | None:
        return {"error": self.error} if self.error else None

    @contextmanager
    def notes(self) -> Iterator[None]:
        """Keep exceptions in the body, which takes notes, away from the script."""
        try:
            yield
        except Exception as error:  # any error here is the observer's, not the script's
            self.recording = False
            self.error = f"{type(error).__name__}: {error}"


class Observers:
    """Several observers, which are notified of each event in order.

    An exception in an ``essential`` observer is raised after all have been notified. Any other observer that raises is
    notified of nothing more except ``stop``, and its final facts give the reason as ``error``.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._errors: dict[str, str] = {}

    def tell(self, event: Callable[[Observer], Facts | None]) -> Facts:
        """Call a method on each observer that has not raised; return their facts by the observers' names."""
        return self._tell([one for one in self._observers if one.name not in self._errors], event)

    def stop(self) -> None:
        """End recording, also for observers that have raised, so that they release what they hold."""
        self._tell(self._observers, lambda one: one.stop())

    def final_facts(self, names: Collection[str] | None = None) -> Facts:
        """Return the facts about the whole process, of all observers or of those with these ``names``."""
        observers = [one for one in self._observers if names is None or one.name in names]
        facts = self._tell([one for one in observers if one.name not in self._errors], lambda one: one.final_facts())
        errors = {one.name: self._errors[one.name] for one in observers if one.name in self._errors}
        return facts | {name: {**facts.get(name, {}), "error": error} for name, error in errors.items()}

    def _tell(self, observers: Sequence[Observer], event: Callable[[Observer], Facts | None]) -> Facts:
        noted: Facts = {}
        raised: Exception | None = None
        for one in observers:
            try:
                facts = event(one)
            except Exception as error:
                if one.essential:
                    raised = raised or error
                else:
                    self._errors.setdefault(one.name, f"{type(error).__name__}: {error}")
            else:
                if facts is not None:
                    noted[one.name] = facts
        if raised is not None:
            raise raised
        return noted
