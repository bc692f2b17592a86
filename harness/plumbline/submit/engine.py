"""What every engine does: it says what it would be sent, takes it, and knows the states of its tasks."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from plumbline.core.errors import PlumblineError

if TYPE_CHECKING:
    from plumbline.submit.submission import Submission


class EngineError(PlumblineError):
    """An engine cannot be reached, or refused what it was asked."""


class Phase(Enum):
    """Where a task is, for any engine."""

    LIVE = "waits or runs"
    ENDED = "ended by itself"
    INTERRUPTED = "ended by the engine for reasons of its own: it may succeed elsewhere, or later"
    CANCELLED = "cancelled by a user or an administrator"


@dataclass(frozen=True)
class TaskState:
    """The state of a task: its engine's ``name`` for it, and what that means; ``reason`` is why it waits."""

    name: str
    phase: Phase
    reason: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it has not ended yet."""
        return self.phase is Phase.LIVE


FORGOTTEN = TaskState("", Phase.ENDED)
"""The state of a task that the engine does not know, or no longer."""


@dataclass(frozen=True)
class Engine(ABC):
    """One engine with its settings: the fields of a subclass, which are values that JSON has.

    ``own_options`` are the options of ``plumbline submit`` that other engines do not read.
    """

    name: ClassVar[str]
    own_options: ClassVar[frozenset[str]]

    @staticmethod
    @abstractmethod
    def add_options(add: Callable[..., Any]) -> None:
        """Declare its own options with ``add``, as ``argparse`` does; one that is not given is None or empty."""

    @classmethod
    @abstractmethod
    def of(cls, options: argparse.Namespace) -> Engine:
        """Return the engine with the settings that the options of ``plumbline submit`` make.

        Raises:
            PlanError: an option is missing or invalid.
        """

    @abstractmethod
    def check(self, submission: Submission) -> None:
        """Refuse what this engine cannot run, before anything is written.

        Raises:
            PlanError: with what to change.
        """

    @abstractmethod
    def text(self, submission: Submission, job: str, tasks: Sequence[int]) -> str:
        """Return what ``send`` sends, without its secrets."""

    @abstractmethod
    def send(self, submission: Submission, job: str, tasks: Sequence[int]) -> str:
        """Send some of the tasks as one job, for which ``job`` is an unused name; return the name that it got.

        Raises:
            EngineError: it was not taken.
        """

    @abstractmethod
    def states(self, submission: Submission, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        """Return the states of tasks, each by its last job, without those that the engine does not know.

        Raises:
            EngineError: the engine does not answer.
        """

    @abstractmethod
    def log(self, submission: Submission, job: str, task: int) -> str:
        """Return where a task's output is: a file, or the command that shows it."""

    def settings(self) -> dict[str, Any]:
        """Return the values of its fields that may be saved beside a run, where others can read them."""
        return asdict(self)

    def end(self, submission: Submission) -> None:  # noqa: B027 - most engines keep nothing
        """Remove what the engine keeps for a run, all of whose cells have been collected."""
