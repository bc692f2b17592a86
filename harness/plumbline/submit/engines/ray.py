"""Ray: each task of a submission is a job of the cluster; ``--launcher ray`` places its ranks.

Every node mounts a file system with the environment, the checkout (if there is one) and the report directory.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from plumbline.core.errors import PlanError
from plumbline.submit.engine import Engine, EngineError, Phase, Tasks, TaskState, variables

_PHASES = {"PENDING": Phase.LIVE, "RUNNING": Phase.LIVE, "STOPPED": Phase.CANCELLED}


@dataclass(frozen=True)
class RayEngine(Engine):
    """The address of the cluster's dashboard (None: from Ray's variables), and environment variables for jobs."""

    name: ClassVar[str] = "ray"
    own_options: ClassVar[frozenset[str]] = frozenset({"address"})

    address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "ray"

    @staticmethod
    def add_options(add: Callable[..., Any]) -> None:
        address = "ray: URL of the cluster's dashboard (default: RAY_API_SERVER_ADDRESS, or this machine)"
        add("--address", metavar="URL", help=address)

    @classmethod
    def of(cls, options: argparse.Namespace) -> RayEngine:
        return cls(options.address, variables(options.env))

    def check(self, submission: Tasks) -> None:
        """Accept every submission: the cluster decides."""

    def text(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        at = ["--address", self.address] if self.address else []
        sent = ["ray", "job", "submit", "--no-wait", *at]
        return "".join(
            f"{shlex.join([*sent, '--submission-id', f'{job}-{task}'])} -- {self._entrypoint(submission, task)}\n"
            for task in tasks
        )

    def send(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        with self._client() as client:
            for task in tasks:
                client.submit_job(
                    entrypoint=self._entrypoint(submission, task),
                    submission_id=f"{job}-{task}",
                    runtime_env={"env_vars": dict(self.environment)},
                )
        return job

    def states(self, submission: Tasks, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        if not jobs:
            return {}
        with self._client() as client:
            known = {job.submission_id: job.status.value for job in client.list_jobs()}
        found = {task: known[f"{job}-{task}"] for task, job in jobs.items() if f"{job}-{task}" in known}
        return {task: TaskState(name, _PHASES.get(name, Phase.ENDED)) for task, name in found.items()}

    def log(self, submission: Tasks, job: str, task: int) -> str:
        return f"ray job logs {job}-{task}"

    def _entrypoint(self, submission: Tasks, task: int) -> str:
        part = str(submission.part(task))
        words = [*submission.work.words(self.launcher), "--report-dir", part, f"@{submission.selection(task)}"]
        return shlex.join(["env", f"--chdir={submission.work.folder}", *words])

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        try:
            from ray.exceptions import RayError
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise PlanError("--engine ray needs Ray: pip install 'ray[default]'") from error
        try:
            yield JobSubmissionClient(self.address)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise EngineError(f"Ray's cluster at {self.address or 'its default address'}: {error}") from error
