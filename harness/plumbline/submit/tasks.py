"""The tasks of a submission, for any engine: what each runs, its cells, its jobs and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.submit.select_cells import SelectedCell

FOLDER = "submission"
"""The folder of the tasks' files, in the run's folder."""


@dataclass(frozen=True)
class TaskCommand:
    """What each task runs: pytest with ``flags`` over its own cells, on ``nodes`` nodes with ``gpus`` devices each.

    ``python`` and ``folder`` are the interpreter and the working directory of the process that submits. ``suites`` is
    the folder of the suites in flags and cells. ``subjects`` and ``workloads`` are the values of ``--subject`` and
    ``--workload``.
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
        """Return the command of every task, without its report directory and its cells."""
        flags = [*self.flags, "--accelerator", self.accelerator, "--launcher", launcher]
        return [self.python, "-m", "pytest", *flags]


@dataclass(frozen=True)
class Tasks:
    """Tasks that share the cells of a run.

    ``run`` is the folder of the run that collects them, ``command`` the user's command. ``tasks`` has the ids of each
    task's cells.
    """

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
    """Split cells among at most ``tasks`` tasks, round-robin: large topologies come last, so each task gets some."""
    return tuple(tuple(cells[task::tasks]) for task in range(min(tasks, len(cells))))
