"""From what was asked for to a submission: the cells, their tasks, and the batch script. Sends nothing."""

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
    """What the user asked for. ``nodes`` and ``gpus`` (of each node) are a job's; ``tasks`` share the cells."""

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


def prepare(asked: SubmitRequest, command: tuple[str, ...]) -> Submission:
    """Plan a submission; ``command`` is what the user typed. Nothing is written.

    Raises:
        PlanError: it cannot be planned, or written down for SLURM.
    """
    words = asked.pytest
    if not words or words[0] in SUITES or words[0].startswith("-"):
        words = tuple(pytest_arguments(words))
    matrix = [*words, "--nodes", str(asked.nodes), "--gpus", str(asked.gpus)]
    selection = select_cells(matrix)
    reports = (asked.report_dir or selection.reports).resolve()
    run = reports / new_run_id(datetime.now(timezone.utc))
    tasks = split_cells([cell.cell for cell in selection.cells], asked.tasks)
    return Submission(run, command, batch_of(asked, selection, run, len(tasks)), selection.cells, tasks)


def batch_of(asked: SubmitRequest, selection: Selection, run: Path, tasks: int) -> BatchScript:
    """Return what each task of a run does: pytest over its own cells, on all of its nodes."""
    gpus: dict[str, str | int | None] = {} if asked.accelerator == "cpu" else {"gpus-per-node": asked.gpus}
    wished = {"partition": asked.partition, "time": asked.time}
    options: dict[str, str | int | None] = {
        "job-name": "plumbline",
        "nodes": asked.nodes,
        "ntasks-per-node": asked.gpus,
        **gpus,
        **{name: value for name, value in wished.items() if value is not None},
        "array": "0" if tasks == 1 else f"0-{tasks - 1}",
        "output": str(run / FOLDER / LOG),
        "no-requeue": None,
        **asked.slurm,
    }
    comments = {
        "ntasks-per-node": "Room for a rank a device.",
        "no-requeue": "A task that is preempted is sent again by `plumbline submit`, with what it left undone only.",
    }
    # Instead of the user's files and folders, each task is told its cells by name.
    flags = [*selection.flags, "--accelerator", asked.accelerator, "--launcher", "slurm"]
    part = f"{shlex.quote(str(run / FOLDER))}/task-$SLURM_ARRAY_TASK_ID"
    words = shlex.join([sys.executable, "-m", "pytest", *flags])
    return BatchScript(
        options=options,
        command=f"{words} --report-dir {part} @{part}/cells.txt",
        folder=str(Path.cwd()),
        modules=asked.modules,
        environment=asked.environment,
        comments=comments,
    )
