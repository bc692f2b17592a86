"""Plans the cells and tasks of a submission from the user's request. Submits nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from plumbline.core.errors import PlanError
from plumbline.core.invocation import SUITES, pytest_arguments, suites
from plumbline.results.header_footer import new_run_id
from plumbline.submit.engine import Engine
from plumbline.submit.select_cells import select_cells
from plumbline.submit.submission import Submission
from plumbline.submit.tasks import TaskCommand, split_cells


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
    """Return the submission of a request; ``command`` is the user's command. Nothing is written.

    Raises:
        PlanError: The request selects no cell, or the engine cannot run it.
    """
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
