"""The base class of observers, which note facts while the user's script runs, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
