"""Ray: each task of a submission is a job of the cluster, whose ranks ``--launcher ray`` places.

The environment, the checkout if there is one, and the report directory are on a file system that every node mounts.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from plumbline.core.errors import PlanError
from plumbline.submit.engine import Engine, EngineError, Phase, TaskState
from plumbline.submit.pairs import variables

if TYPE_CHECKING:
    from plumbline.submit.submission import Submission

_PHASES = {"PENDING": Phase.LIVE, "RUNNING": Phase.LIVE, "STOPPED": Phase.CANCELLED}


@dataclass(frozen=True)
class RayEngine(Engine):
    """The address of the cluster's dashboard (None: Ray's own variables say it), and variables of its jobs."""

    name: ClassVar[str] = "ray"
    own_options: ClassVar[frozenset[str]] = frozenset({"address"})

    address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "ray"

    @staticmethod
    def add_options(add: Callable[..., Any]) -> None:
        """Declare its own options."""
        add("--address", metavar="URL", help="ray: the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, or here)")

    @classmethod
    def of(cls, options: argparse.Namespace) -> RayEngine:
        """Return the engine with the settings that the options make."""
        return cls(options.address, variables(options.env))

    def check(self, submission: Submission) -> None:
        """Refuse nothing: the cluster knows what it has."""

    def text(self, submission: Submission, job: str, tasks: Sequence[int]) -> str:
        """Return the commands that send the tasks by hand."""
        at = ["--address", self.address] if self.address else []
        sent = ["ray", "job", "submit", "--no-wait", *at]
        lines = [
            f"{shlex.join([*sent, '--submission-id', f'{job}-{task}'])} -- {self._entrypoint(submission, task)}\n"
            for task in tasks
        ]
        return "".join(lines)

    def send(self, submission: Submission, job: str, tasks: Sequence[int]) -> str:
        """Submit a job for each task."""
        with self._client() as client:
            for task in tasks:
                client.submit_job(
                    entrypoint=self._entrypoint(submission, task),
                    submission_id=f"{job}-{task}",
                    runtime_env={"env_vars": dict(self.environment)},
                )
        return job

    def states(self, submission: Submission, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        """Ask the cluster for its jobs."""
        if not jobs:
            return {}
        with self._client() as client:
            known = {job.submission_id: job.status.value for job in client.list_jobs()}
        found = {task: known[f"{job}-{task}"] for task, job in jobs.items() if f"{job}-{task}" in known}
        return {task: TaskState(name, _PHASES.get(name, Phase.ENDED)) for task, name in found.items()}

    def log(self, submission: Submission, job: str, task: int) -> str:
        """Return the command that shows a job's output."""
        return f"ray job logs {job}-{task}"

    def _entrypoint(self, submission: Submission, task: int) -> str:
        part = str(submission.part(task))
        words = [*submission.work.command(self.launcher), "--report-dir", part, f"@{submission.selection(task)}"]
        return shlex.join(["env", f"--chdir={submission.work.folder}", *words])

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """Yield a client of the cluster, whose errors become ``EngineError``."""
        try:
            from ray.exceptions import RayError
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise PlanError("--engine ray sends jobs with Ray: pip install 'ray[default]'") from error
        try:
            yield JobSubmissionClient(self.address)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise EngineError(f"Ray's cluster at {self.address or 'its default address'}: {error}") from error
