"""The tasks of a submission, and the interface of the engines that run them."""

from __future__ import annotations

import argparse
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from plumbline.core.errors import PlanError, PlumblineError

FOLDER = "submission"  # the folder of the tasks' files, in the run's folder


@dataclass(frozen=True)
class SelectedCell:
    """A selected cell: its id, its pytest node id (with an absolute path), and its :class:`PlannedCell` as JSON."""

    cell: str
    nodeid: str
    planned: dict[str, Any]


@dataclass(frozen=True)
class TaskCommand:
    """What each task runs: pytest with ``flags`` over its own cells, on ``nodes`` nodes with ``gpus`` devices each.

    ``python`` and ``folder`` are the interpreter and the working directory of the submitting process. ``suites`` is the
    folder of the suites that occurs in flags and cells. ``subjects`` and ``workloads`` are the values of ``--subject``
    and ``--workload``.
    """

    nodes: int
    gpus: int
    accelerator: str
    flags: tuple[str, ...]
    subjects: tuple[str, ...]
    workloads: tuple[str, ...]
    python: str
    folder: str
    suites: str

    def words(self, launcher: str) -> list[str]:
        """Return the command that all tasks share, without report directory and cells."""
        flags = [*self.flags, "--accelerator", self.accelerator, "--launcher", launcher]
        return [self.python, "-m", "pytest", *flags]


@dataclass(frozen=True)
class Tasks:
    """Tasks, each as the ids of its cells, and the folder of the ``run`` that collects their results."""

    run: Path
    command: tuple[str, ...]
    work: TaskCommand
    cells: tuple[SelectedCell, ...]
    tasks: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        return self.run / FOLDER

    def part(self, task: int) -> Path:
        return self.folder / f"task-{task}"

    def selection(self, task: int) -> Path:
        return self.part(task) / "cells.txt"

    def select(self, task: int, cells: Sequence[str]) -> None:
        nodeids = {cell.cell: cell.nodeid for cell in self.cells}
        self.part(task).mkdir(exist_ok=True)
        self.selection(task).write_text("".join(f"{nodeids[cell]}\n" for cell in cells))

    def new_job(self) -> str:
        """Return an unused name for a job: lower-case letters, digits and hyphens."""
        return f"plumbline-{self.run.name.lower()}-{len(self._lines())}"

    def add_job(self, job: str, tasks: Sequence[int]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"job": job, "tasks": list(tasks)}) + "\n")

    def jobs(self) -> dict[int, str]:
        return {task: line["job"] for line in self._lines() for task in line["tasks"]}

    def tasks_of(self, job: str) -> list[int]:
        return next(line["tasks"] for line in self._lines() if line["job"] == job)

    @property
    def _file(self) -> Path:
        return self.folder / "jobs.jsonl"

    def _lines(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self._file.read_text().splitlines())) if self._file.exists() else []


def split_cells(cells: Sequence[str], tasks: int) -> tuple[tuple[str, ...], ...]:
    """Split cells round-robin into at most ``tasks`` tasks. Large topologies come last, so each task gets some."""
    return tuple(tuple(cells[task::tasks]) for task in range(min(tasks, len(cells))))


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
    """The state of a task: the engine's ``name`` for the state, the phase, and the reason why the task waits."""

    name: str
    phase: Phase
    reason: str = ""

    @property
    def is_live(self) -> bool:
        return self.phase is Phase.LIVE


FORGOTTEN = TaskState("", Phase.ENDED)  # the state of a task that the engine does not know, or no longer knows


@dataclass(frozen=True)
class Engine(ABC):
    """One engine. The fields of a subclass are its settings. JSON must be able to represent their values.

    ``own_options`` are the options of ``plumbline submit`` that only this engine reads.
    """

    name: ClassVar[str]
    own_options: ClassVar[frozenset[str]]

    @staticmethod
    @abstractmethod
    def add_options(add: Callable[..., Any]) -> None:
        """Declare the engine's own options with ``add``, as in ``argparse``. Their defaults are None or empty."""

    @classmethod
    @abstractmethod
    def of(cls, options: argparse.Namespace) -> Engine:
        """Return the engine with the settings in the options; raise ``PlanError`` if one is missing or invalid."""

    @abstractmethod
    def check(self, submission: Tasks) -> None:
        """Raise ``PlanError`` if this engine cannot run the submission. Called before anything is written."""

    @abstractmethod
    def text(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        """Return what ``send`` sends, without its secrets."""

    @abstractmethod
    def send(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        """Send tasks as one job, named ``job`` if possible; return its actual name, or raise ``EngineError``."""

    @abstractmethod
    def states(self, submission: Tasks, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        """Return the state of each task that the engine knows. ``jobs`` has the last job of each task.

        Raises:
            EngineError: The engine cannot be reached, or refused the request.
        """

    @abstractmethod
    def log(self, submission: Tasks, job: str, task: int) -> str:
        """Return the file with a task's output, or the command that shows it."""

    def settings(self) -> dict[str, Any]:
        """Return the settings to save in the run's folder, where others can read them."""
        return asdict(self)

    def end(self, submission: Tasks) -> None:  # noqa: B027 - most engines keep nothing
        """Remove everything that the engine keeps for a run, after all cells have been collected."""


def pairs(option: str, given: Sequence[str], *, valueless: bool = False) -> dict[str, Any]:
    """Return the values by name. A name without a value raises ``PlanError`` or, if ``valueless``, gets None."""
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not (equals or valueless):
            raise PlanError(f"{option} {text!r} should look like NAME=VALUE")
        found[name] = value if equals else None
    return found


def variables(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``. A name alone takes its value from this process, or raises ``PlanError``."""
    found: dict[str, str | None] = pairs("--env", given, valueless=True)
    for name in [name for name, value in found.items() if value is None]:
        if name not in os.environ:
            raise PlanError(f"--env {name}: this variable is not set: set it, or use --env {name}=VALUE")
        found[name] = os.environ[name]
    return {name: value or "" for name, value in found.items()}
