"""SLURM: a submission is a job array with one element per task."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from plumbline.slurm.scheduler import INTERRUPTED, LIVE, BatchScript, sbatch, states
from plumbline.submit.engine import Engine, Phase, Tasks, TaskState, pairs, variables

LOG = "log-%A_%a.txt"  # the file with a task's output, in SLURM's notation for job and index


@dataclass(frozen=True)
class SlurmEngine(Engine):
    """The options of sbatch and of the batch script."""

    name: ClassVar[str] = "slurm"
    own_options: ClassVar[frozenset[str]] = frozenset({"partition", "time", "module", "slurm"})

    partition: str | None = None
    time: str | None = None
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def add_options(add: Callable[..., Any]) -> None:
        add("--partition", metavar="NAME", help="slurm: the partition to run in")
        add("--time", metavar="LIMIT", help="slurm: time limit of each task in SLURM's format, for example 02:00:00")
        add("--module", action="append", default=[], metavar="NAME", help="slurm: a module to load (repeatable)")
        any_other = "slurm: any other option of sbatch (repeatable)"
        add("--slurm", action="append", default=[], metavar="NAME=VALUE", help=any_other)

    @classmethod
    def of(cls, options: argparse.Namespace) -> SlurmEngine:
        environment = variables(options.env)
        slurm = pairs("--slurm", options.slurm, valueless=True)
        return cls(options.partition, options.time, tuple(options.module), environment, slurm)

    def check(self, submission: Tasks) -> None:
        self.batch(submission)

    def batch(self, submission: Tasks) -> BatchScript:
        work, tasks = submission.work, len(submission.tasks)
        gpus: dict[str, str | int | None] = {} if work.accelerator == "cpu" else {"gpus-per-node": work.gpus}
        wished = {"partition": self.partition, "time": self.time}
        options: dict[str, str | int | None] = {
            "job-name": "plumbline",
            "nodes": work.nodes,
            "ntasks-per-node": work.gpus,
            **gpus,
            **{name: value for name, value in wished.items() if value is not None},
            "array": "0" if tasks == 1 else f"0-{tasks - 1}",
            "output": str(submission.folder / LOG),
            "no-requeue": None,
            **self.slurm,
        }
        comments = {
            "ntasks-per-node": "Room for one rank on each device.",
            "no-requeue": "`plumbline submit` resubmits a preempted task, with its unfinished cells only.",
        }
        part = f"{shlex.quote(str(submission.folder))}/task-$SLURM_ARRAY_TASK_ID"
        return BatchScript(
            options=options,
            command=f"{shlex.join(work.words('slurm'))} --report-dir {part} @{part}/cells.txt",
            folder=work.folder,
            modules=self.modules,
            environment=self.environment,
            comments=comments,
        )

    def text(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        return self.batch(submission).text()

    def send(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        script = self.text(submission, job, tasks)
        (submission.folder / "batch.sh").write_text(script)
        return str(sbatch(script, ",".join(map(str, tasks))))

    def states(self, submission: Tasks, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        found = states({int(job) for job in jobs.values()})
        known = {task: found[place] for task, job in jobs.items() if (place := (int(job), task)) in found}
        phases = {**dict.fromkeys(LIVE, Phase.LIVE), **dict.fromkeys(INTERRUPTED, Phase.INTERRUPTED)}
        return {
            task: TaskState(
                name, phases.get(name, Phase.CANCELLED if name.startswith("CANCELLED") else Phase.ENDED), reason
            )
            for task, (name, reason) in known.items()
        }

    def log(self, submission: Tasks, job: str, task: int) -> str:
        return str(submission.folder / LOG.replace("%A", job).replace("%a", str(task)))
