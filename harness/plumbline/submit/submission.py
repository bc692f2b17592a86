"""A submission on disk: its cells, what its tasks run, its jobs and its paths. JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlumblineError
from plumbline.results.atomic import point_symlink
from plumbline.results.run import LATEST
from plumbline.submit.engine import Engine
from plumbline.submit.engines import ENGINES
from plumbline.submit.select_cells import SelectedCell

FOLDER = "submission"
"""The folder of the tasks' files, in the run's folder."""


class NoSubmissionError(PlumblineError):
    """There is no submission to attach to."""


@dataclass(frozen=True)
class Work:
    """What each task runs: pytest with ``flags`` over its own cells, on ``nodes`` nodes of ``gpus`` devices each.

    ``python`` and ``folder`` are the interpreter and the folder of the process that submits, ``suites`` the folder of
    the suites that flags and cells name, ``subjects`` and ``workloads`` what ``--subject`` and ``--workload`` name.
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

    def command(self, launcher: str) -> list[str]:
        """Return the command of every task, which is followed by its report directory and its cells."""
        flags = [*self.flags, "--accelerator", self.accelerator, "--launcher", launcher]
        return [self.python, "-m", "pytest", *flags]


@dataclass(frozen=True)
class Submission:
    """Tasks over cells, for one engine.

    ``command`` is the user's command. ``tasks`` holds the ids of each task's cells. ``run`` is the folder of the run
    that collects them.
    """

    run: Path
    command: tuple[str, ...]
    engine: Engine
    work: Work
    cells: tuple[SelectedCell, ...]
    tasks: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.run / FOLDER

    def part(self, task: int) -> Path:
        """Return the report directory of one task."""
        return self.folder / f"task-{task}"

    def selection(self, task: int) -> Path:
        """Return the file with the cells of a task, as arguments for pytest."""
        return self.part(task) / "cells.txt"

    def select(self, task: int, cells: Sequence[str]) -> None:
        """Write the file with the cells that a task is to examine."""
        nodeids = {cell.cell: cell.nodeid for cell in self.cells}
        self.part(task).mkdir(exist_ok=True)
        self.selection(task).write_text("".join(f"{nodeids[cell]}\n" for cell in cells))

    def save(self) -> None:
        """Write it to a new folder."""
        self.folder.mkdir(parents=True)
        point_symlink(self.run.parent / LATEST, self.run.name)
        engine = {"name": self.engine.name, **self.engine.settings()}
        values = {**asdict(self), "run": str(self.run), "engine": engine}
        (self.folder / "submission.json").write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, run: Path) -> Submission:
        """Read what :meth:`save` wrote; ``run`` may be a link to the run's folder.

        Raises:
            NoSubmissionError: that run was not submitted, or its file is broken.
        """
        run = run.resolve()
        try:
            values = json.loads((run / FOLDER / "submission.json").read_text())
            engine = ENGINES[values["engine"].pop("name")]
            cells = tuple(SelectedCell(**cell) for cell in values["cells"])
            tasks = tuple(map(tuple, values["tasks"]))
            work = Work(**_with_tuples(values["work"]))
            return cls(run, tuple(values["command"]), engine(**_with_tuples(values["engine"])), work, cells, tasks)
        except FileNotFoundError as error:
            raise NoSubmissionError(f"{run} was not made by `plumbline submit`: name a run that was") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoSubmissionError(f"{run / FOLDER / 'submission.json'} cannot be read: {error}") from error

    def new_job(self) -> str:
        """Return a name that no job of this submission has yet: lower-case letters, digits and hyphens."""
        return f"plumbline-{self.run.name.lower()}-{len(self._lines())}"

    def add_job(self, job: str, tasks: Sequence[int]) -> None:
        """Record that a job was sent for some of the tasks."""
        with self._file.open("a") as file:
            file.write(json.dumps({"job": job, "tasks": list(tasks)}) + "\n")

    def jobs(self) -> dict[int, str]:
        """Return the job that was last sent for each task."""
        return {task: line["job"] for line in self._lines() for task in line["tasks"]}

    def tasks_of(self, job: str) -> list[int]:
        """Return the tasks that were sent as one job, in their order."""
        return next(line["tasks"] for line in self._lines() if line["job"] == job)

    @property
    def _file(self) -> Path:
        return self.folder / "jobs.jsonl"

    def _lines(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self._file.read_text().splitlines())) if self._file.exists() else []


def split_cells(cells: Sequence[str], tasks: int) -> tuple[tuple[str, ...], ...]:
    """Split cells among at most ``tasks`` tasks, round-robin: large topologies come last, so each task gets some."""
    return tuple(tuple(cells[task::tasks]) for task in range(min(tasks, len(cells))))


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
