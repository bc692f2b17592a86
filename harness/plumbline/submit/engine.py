"""The interface of engines: what they are sent, the states of their tasks, and how their options are read."""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, ClassVar

from plumbline.core.errors import PlanError, PlumblineError
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


def pairs(option: str, given: Sequence[str], *, valueless: bool = False) -> dict[str, Any]:
    """Return the values by name; None for a name alone, which is refused unless ``valueless``.

    Raises:
        PlanError: A text does not have this form.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or valueless):
            raise PlanError(f"{option} {text!r} should look like NAME=VALUE")
        found[name] = value if equals else None
    return found


def variables(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``; a name alone takes the value in this process.

    Raises:
        PlanError: A text does not have this form, or this process has no such variable.
    """
    found: dict[str, str | None] = pairs("--env", given, valueless=True)
    for name in [name for name, value in found.items() if value is None]:
        if name not in os.environ:
            raise PlanError(f"--env {name}: this variable is not set: set it, or use --env {name}=VALUE")
        found[name] = os.environ[name]
    return {name: value or "" for name, value in found.items()}
