"""Plans a submission from the user's request: cells, tasks and the batch script. Submits nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from harness.core.errors import PlanError
from harness.core.invocation import SUITES, pytest_arguments
from harness.results.header_footer import new_run_id
from harness.slurm.script import BatchScript
from harness.slurm.select_cells import Selection, select_cells
from harness.slurm.submission import FOLDER, LOG, Submission, split_cells


@dataclass(frozen=True)
class SubmitRequest:
    """The options of ``plumbline submit``: each of ``tasks`` has ``nodes`` nodes with ``gpus`` devices each."""

    nodes: int
    gpus: int
    tasks: int = 1
    partition: str | None = None
    time: str | None = None
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: Mapping[str, str | None] = field(default_factory=dict)
    accelerator: str = "auto"
    report_dir: Path | None = None
    pytest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "tasks"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('tasks', 'array')} {getattr(self, name)}: at least one is needed")


def prepare(request: SubmitRequest, command: tuple[str, ...]) -> Submission:
    """Return the submission of a request; ``command`` is the user's command. Nothing is written.

    Raises:
        PlanError: it selects no cell, or cannot be expressed in a batch script.
    """
    words = request.pytest
    if not words or words[0] in SUITES or words[0].startswith("-"):
        words = tuple(pytest_arguments(words))
    matrix = [*words, "--nodes", str(request.nodes), "--gpus", str(request.gpus)]
    selection = select_cells(matrix)
    reports = (request.report_dir or selection.reports).resolve()
    run = reports / new_run_id(datetime.now(timezone.utc))
    tasks = split_cells([cell.cell for cell in selection.cells], request.tasks)
    return Submission(run, command, batch_of(request, selection, run, len(tasks)), selection.cells, tasks)


def batch_of(request: SubmitRequest, selection: Selection, run: Path, tasks: int) -> BatchScript:
    """Return the script of each task: pytest over its own cells, on all of its nodes."""
    gpus: dict[str, str | int | None] = {} if request.accelerator == "cpu" else {"gpus-per-node": request.gpus}
    wished = {"partition": request.partition, "time": request.time}
    options: dict[str, str | int | None] = {
        "job-name": "plumbline",
        "nodes": request.nodes,
        "ntasks-per-node": request.gpus,
        **gpus,
        **{name: value for name, value in wished.items() if value is not None},
        "array": "0" if tasks == 1 else f"0-{tasks - 1}",
        "output": str(run / FOLDER / LOG),
        "no-requeue": None,
        **request.slurm,
    }
    comments = {
        "ntasks-per-node": "Room for one rank on each device.",
        "no-requeue": "`plumbline submit` resubmits a preempted task, with its unfinished cells only.",
    }
    # Each task gets its cells by name instead of the user's files and folders.
    flags = [*selection.flags, "--accelerator", request.accelerator, "--launcher", "slurm"]
    part = f"{shlex.quote(str(run / FOLDER))}/task-$SLURM_ARRAY_TASK_ID"
    words = shlex.join([sys.executable, "-m", "pytest", *flags])
    return BatchScript(
        options=options,
        command=f"{words} --report-dir {part} @{part}/cells.txt",
        folder=str(Path.cwd()),
        modules=request.modules,
        environment=request.environment,
        comments=comments,
    )
