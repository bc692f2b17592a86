"""A submission: planned from what the user asked for, and stored on disk as JSON, no pickle."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlanError, PlumblineError
from plumbline.core.invocation import SUITES, pytest_arguments, suites
from plumbline.results.files import point_symlink
from plumbline.results.header_footer import new_run_id
from plumbline.results.run import LATEST
from plumbline.submit.engine import FOLDER, Engine, TaskCommand, Tasks, split_cells
from plumbline.submit.engines import ENGINES
from plumbline.submit.select_cells import SelectedCell, select_cells


class NoSubmissionError(PlumblineError):
    """A run was not submitted, or its submission cannot be read."""


@dataclass(frozen=True)
class Submission(Tasks):
    """Tasks for one engine."""

    engine: Engine

    def save(self) -> None:
        self.folder.mkdir(parents=True)
        point_symlink(self.run.parent / LATEST, self.run.name)
        engine = {"name": self.engine.name, **self.engine.settings()}
        values = {**asdict(self), "run": str(self.run), "engine": engine}
        (self.folder / "submission.json").write_text(json.dumps(values, indent=1))

    @classmethod
    def load(cls, run: Path) -> Submission:
        """Read what ``save`` wrote, or raise ``NoSubmissionError``; ``run`` may be a link to the run's folder."""
        run = run.resolve()
        try:
            values = json.loads((run / FOLDER / "submission.json").read_text())
            engine = ENGINES[values["engine"].pop("name")]
            return cls(
                run,
                tuple(values["command"]),
                TaskCommand(**_with_tuples(values["work"])),
                tuple(SelectedCell(**cell) for cell in values["cells"]),
                tuple(map(tuple, values["tasks"])),
                engine(**_with_tuples(values["engine"])),
            )
        except FileNotFoundError as error:
            raise NoSubmissionError(f"{run} was not made by `plumbline submit`: choose a run that was") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoSubmissionError(f"{run / FOLDER / 'submission.json'} cannot be read: {error}") from error


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class SubmitRequest:
    """The options of ``plumbline submit``; each of ``tasks`` has ``nodes`` nodes with ``gpus`` devices each."""

    engine: Engine
    nodes: int
    gpus: int
    tasks: int = 1
    accelerator: str = "auto"
    report_dir: Path | None = None
    pytest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "tasks"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('tasks', 'array')} {getattr(self, name)}: must be at least 1")


def prepare(request: SubmitRequest, command: tuple[str, ...]) -> Submission:
    """Return the submission of a request, or raise ``PlanError``; ``command`` is the user's. Nothing is written."""
    words = request.pytest
    if not words or words[0] in SUITES or words[0].startswith("-"):
        words = tuple(pytest_arguments(words))
    selection = select_cells([*words, "--nodes", str(request.nodes), "--gpus", str(request.gpus)])
    reports = (request.report_dir or selection.reports).resolve()
    run = reports / new_run_id(datetime.now(timezone.utc))
    work = TaskCommand(
        nodes=request.nodes,
        gpus=request.gpus,
        accelerator=request.accelerator,
        flags=selection.flags,
        subjects=selection.subjects,
        workloads=selection.workloads,
        python=sys.executable,
        folder=str(Path.cwd()),
        suites=str(suites()),
    )
    tasks = split_cells([cell.cell for cell in selection.cells], request.tasks)
    submission = Submission(run, command, work, selection.cells, tasks, request.engine)
    request.engine.check(submission)
    return submission
