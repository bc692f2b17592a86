"""The interface of engines: what they are sent, and the states of their tasks."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, ClassVar

from plumbline.core.errors import PlumblineError
from plumbline.submit.tasks import Tasks


class EngineError(PlumblineError):
    """An engine cannot be reached, or refused a request."""


class Phase(Enum):
    """The phase of a task, for any engine."""

    LIVE = "waits or runs"
    ENDED = "ended by itself"
    INTERRUPTED = "ended by the engine, for example preempted: it may succeed later, or on other nodes"
    CANCELLED = "cancelled by a user or an administrator"


@dataclass(frozen=True)
class TaskState:
    """The state of a task: the engine's ``name`` for it, its phase, and the reason why it waits."""

    name: str
    phase: Phase
    reason: str = ""

    @property
    def is_live(self) -> bool:
        return self.phase is Phase.LIVE


FORGOTTEN = TaskState("", Phase.ENDED)
"""The state of a task that the engine does not know (any more)."""


@dataclass(frozen=True)
class Engine(ABC):
    """One engine. Its settings are the fields of a subclass, with values that JSON has.

    ``own_options`` are the options of ``plumbline submit`` that only this engine reads.
    """

    name: ClassVar[str]
    own_options: ClassVar[frozenset[str]]

    @staticmethod
    @abstractmethod
    def add_options(add: Callable[..., Any]) -> None:
        """Declare its own options with ``add``, as in ``argparse``; their defaults are None or empty."""

    @classmethod
    @abstractmethod
    def of(cls, options: argparse.Namespace) -> Engine:
        """Return the engine with the settings from the options of ``plumbline submit``.

        Raises:
            PlanError: An option is missing or invalid.
        """

    @abstractmethod
    def check(self, submission: Tasks) -> None:
        """Refuse what this engine cannot run, before anything is written.

        Raises:
            PlanError: It cannot run this; the message says what to change.
        """

    @abstractmethod
    def text(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        """Return what ``send`` sends, without its secrets."""

    @abstractmethod
    def send(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        """Send some of the tasks as one job, for which ``job`` is an unused name; return the job's actual name.

        Raises:
            EngineError: The engine did not accept it.
        """

    @abstractmethod
    def states(self, submission: Tasks, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        """Return the states of tasks by their last jobs, without those that the engine does not know.

        Raises:
            EngineError: The engine does not answer.
        """

    @abstractmethod
    def log(self, submission: Tasks, job: str, task: int) -> str:
        """Return the file with a task's output, or the command that shows it."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that may be saved beside a run, where others can read them."""
        return asdict(self)

    def end(self, submission: Tasks) -> None:  # noqa: B027 - most engines keep nothing
        """Remove what the engine keeps for a run, after all cells have been collected."""
