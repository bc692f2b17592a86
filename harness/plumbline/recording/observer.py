"""What an observer of a training is: it notes facts while the user's script runs, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.recording.pause import is_paused

Facts = dict[str, Any]
"""What an observer noted, as JSON values, by the observer's name."""


class Observer:
    """Notes facts about a training. Every method may be left out; all are called on the thread that trains.

    ``name`` is the key of its facts in a step's and in the process's evidence. Between ``start`` and ``stop`` steps are
    recorded; before and after nothing may cost time. An exception in an ``essential`` observer ends recording, one in
    another observer ends only its own notes; the script goes on.
    """

    name: str
    essential = False
    recording = False

    @property
    def attends(self) -> bool:
        """Whether what runs now is the script's, and notes are taken of it."""
        return self.recording and not is_paused()

    def install(self) -> None:
        """Called once, as soon as torch is imported and before the script uses it: the place for lasting patches."""

    def found(self, one: Any) -> None:
        """Something is there that the script has made before recording was installed: ``one`` is of any type."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """The script has made an optimizer, or steps with one whose making was not seen, recorded or not."""

    def first_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to take its first step of all, recorded or not."""

    def start(self) -> None:
        """Recording begins: it may be in the middle of a script, between two optimizer steps."""
        self.recording = True

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module that holds parameters is called, with gradients enabled."""

    def forward_ends(self) -> None:
        """The call of the module that began last has returned."""

    def runs_again(self, module: nn.Module) -> None:
        """A backward pass runs a module of a recorded forward again, as checkpoints do."""

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """The backward pass with this number begins, at these tensors."""

    def backward_ends(self, number: int) -> Facts | None:
        """The backward pass with this number has ended; what is returned becomes part of its facts."""
        return None

    def before_replay(self, call: Any, exact: Any, native: Any) -> None:
        """A recorded call is about to be replayed, before its optimizer steps.

        ``exact`` and ``native`` hold what stands for parameters in the two precisions of replays.
        """

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: gradients and weights are those with which it steps."""

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """An optimizer has stepped, or the GradScaler has skipped it; what is returned are the step's facts."""
        return None

    def stop(self) -> None:
        """Recording ends."""
        self.recording = False

    def final_facts(self) -> Facts | None:
        """Return the facts about the whole process, when it ends or as soon as evidence is written."""
        return None

    def after_recording(self, write: Callable[[], None]) -> None:
        """The recorded steps are written, and the script goes on.

        An observer that still watches calls ``write`` whenever its final facts have changed.
        """
