"""A submission on disk: its cells, its batch script, its jobs and its paths. JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import PlumblineError
from harness.results.atomic import point_symlink
from harness.results.run import LATEST
from harness.slurm.script import BatchScript
from harness.slurm.select_cells import SelectedCell

FOLDER = "submission"
"""The folder of the jobs' files, in the run's folder."""

LOG = "log-%A_%a.txt"
"""The file of a task's output, by job and index, in SLURM's notation."""


class NoSubmissionError(PlumblineError):
    """There is no submission to attach to."""


@dataclass(frozen=True)
class Submission:
    """One job array over cells.

    ``command`` is the user's command. ``batch`` is the script of each task. ``tasks`` holds the ids of each task's
    cells. ``run`` is the folder of the run that collects them.
    """

    run: Path
    command: tuple[str, ...]
    batch: BatchScript
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

    def log(self, job: int, task: int) -> Path:
        """Return the file with the output of a task of a job."""
        return self.folder / LOG.replace("%A", str(job)).replace("%a", str(task))

    def select(self, task: int, cells: Sequence[str]) -> None:
        """Write the file with the cells that a task is to examine."""
        nodeids = {cell.cell: cell.nodeid for cell in self.cells}
        self.part(task).mkdir(exist_ok=True)
        self.selection(task).write_text("".join(f"{nodeids[cell]}\n" for cell in cells))

    def save(self) -> None:
        """Write it to a new folder."""
        self.folder.mkdir(parents=True)
        point_symlink(self.run.parent / LATEST, self.run.name)
        values = {**asdict(self), "run": str(self.run)}
        (self.folder / "submission.json").write_text(json.dumps(values, indent=1))
        (self.folder / "batch.sh").write_text(self.batch.text())

    @classmethod
    def load(cls, run: Path) -> Submission:
        """Read what :meth:`save` wrote; ``run`` may be a link to the run's folder.

        Raises:
            NoSubmissionError: that run was not submitted, or its file is broken.
        """
        run = run.resolve()
        try:
            values = json.loads((run / FOLDER / "submission.json").read_text())
            lists = {name: tuple(values["batch"][name]) for name in ("modules", "commands")}
            batch = BatchScript(**{**values["batch"], **lists})
            cells = tuple(SelectedCell(**cell) for cell in values["cells"])
            tasks = tuple(map(tuple, values["tasks"]))
            return cls(run, tuple(values["command"]), batch, cells, tasks)
        except FileNotFoundError as error:
            raise NoSubmissionError(f"{run} was not made by `plumbline submit`: name a run that was") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoSubmissionError(f"{run / FOLDER / 'submission.json'} cannot be read: {error}") from error

    def add_job(self, job: int, tasks: Sequence[int]) -> None:
        """Record that a job array was submitted for some of the tasks."""
        with (self.folder / "jobs.jsonl").open("a") as file:
            file.write(json.dumps({"job": job, "tasks": list(tasks)}) + "\n")

    def jobs(self) -> dict[int, int]:
        """Return the job that was last submitted for each task."""
        file = self.folder / "jobs.jsonl"
        lines: list[dict[str, Any]] = list(map(json.loads, file.read_text().splitlines())) if file.exists() else []
        return {task: line["job"] for line in lines for task in line["tasks"]}


def split_cells(cells: Sequence[str], tasks: int) -> tuple[tuple[str, ...], ...]:
    """Split cells among at most ``tasks`` tasks, round-robin: large topologies come last, so each task gets some."""
    return tuple(tuple(cells[task::tasks]) for task in range(min(tasks, len(cells))))
