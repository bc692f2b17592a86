"""Kubernetes: single-node tasks share an indexed Job; each multi-node task is a JobSet or a PyTorchJob.

The report directory is on a volume that this machine and the pods mount at the same path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from plumbline.core.errors import PlanError
from plumbline.core.invocation import command
from plumbline.submit.engine import Engine, EngineError, Tasks, TaskState, variables
from plumbline.submit.kubernetes_objects import (
    INDEX_LABEL,
    JOB_LABEL,
    KINDS,
    TASK_LABEL,
    PodSettings,
    manifests,
    secret,
    states_of,
)
from plumbline.worker.node_server import TOKEN

COMMAND_TIMEOUT_S = 60.0
_RESOURCES = {"job": "jobs.batch", "jobset": "jobsets.jobset.x-k8s.io", "pytorchjob": "pytorchjobs.kubeflow.org"}


@dataclass(frozen=True)
class KubernetesEngine(Engine):
    """The image of the pods, the claim of the volume, and the namespace (None: kubectl's default).

    ``mount`` is the volume's path (None: the report directory). ``kind`` is the kind of object (None: a Job for
    single-node tasks, otherwise a JobSet). ``pod`` is merged into each pod's spec. ``environment`` goes into the run's
    Secret, not into manifests.
    """

    name: ClassVar[str] = "kubernetes"
    own_options: ClassVar[frozenset[str]] = frozenset({"image", "namespace", "volume", "kind", "pod"})

    image: str
    claim: str
    mount: str | None = None
    namespace: str | None = None
    kind: str | None = None
    pod: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def add_options(add: Callable[..., Any]) -> None:
        add("--image", metavar="NAME", help="kubernetes: the image of the pods, as ci/Dockerfile builds it")
        volume = "kubernetes: the persistent volume claim, mounted here at PATH (default: at the report directory)"
        add("--volume", metavar="CLAIM[=PATH]", help=volume)
        add("--namespace", metavar="NAME", help="kubernetes: the namespace (default: kubectl's)")
        kind = "kubernetes: kind of object for a task (default: job, or jobset for several nodes)"
        add("--kind", choices=KINDS, help=kind)
        add("--pod", type=Path, metavar="FILE", help="kubernetes: YAML that is merged into each pod's spec")

    @classmethod
    def of(cls, options: argparse.Namespace) -> KubernetesEngine:
        for option, what in (
            ("image", "the image of its pods"),
            ("volume", "the persistent volume claim for the reports"),
        ):
            if not getattr(options, option):
                raise PlanError(f"--engine kubernetes needs --{option}, {what}")
        claim, _, mount = options.volume.partition("=")
        for what, name in (("--volume", claim), ("--namespace", options.namespace)):
            if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
                raise PlanError(f"{what} {name}: names in Kubernetes have lower-case letters, digits and hyphens")
        patch = {}
        if options.pod:
            yaml = _yaml()
            try:
                patch = yaml.safe_load(options.pod.read_text())
            except yaml.YAMLError as error:
                raise PlanError(f"--pod {options.pod} is not valid YAML: {error}") from error
            if not isinstance(patch, dict):
                raise PlanError(
                    f"--pod {options.pod}: a pod's spec must be a mapping, such as nodeSelector: {{pool: gpu}}"
                )
        path = str(Path(mount).resolve()) if mount else None
        return cls(options.image, claim, path, options.namespace, options.kind, patch, variables(options.env))

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "environment": {}}

    def check(self, submission: Tasks) -> None:
        work, mount = submission.work, self._mount(submission)
        _yaml()
        if not submission.run.is_relative_to(mount):
            raise PlanError(
                f"the report directory {submission.run.parent} is not on the volume {self.claim}, which is mounted at "
                f"{mount}: choose one on the volume (--report-dir), or set the mount point (--volume {self.claim}=PATH)"
            )
        begins_there = Path(work.folder).is_relative_to(mount)
        for locator in (*work.subjects, *work.workloads):
            file = Path(locator.partition(";")[0].partition("::")[0])
            on_volume = file.resolve().is_relative_to(mount) and (file.is_absolute() or begins_there)
            if file.is_file() and not on_volume:
                raise PlanError(
                    f"{locator}: pods see only the volume {self.claim}, at {mount}, and their image. Copy the file to "
                    "the volume and give its full path, or name a module of the image."
                )
        if work.nodes == 1:
            return
        if self.kind == "job":
            raise PlanError(f"--kind job is for tasks of one node, not {work.nodes}: use --kind jobset or pytorchjob")
        if len(work.subjects) > 1 or ";" in work.subjects[0]:
            raise PlanError(
                f"--subject {' '.join(work.subjects)}: on several nodes, a run has one subject, which runs in the "
                "image's Python. Submit a run for each subject."
            )

    def text(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        hidden = dict.fromkeys(self._variables(submission), "(not shown)")
        return _dumped([secret(_secret(submission), hidden), *self._objects(submission, job, tasks)])

    def send(self, submission: Tasks, job: str, tasks: Sequence[int]) -> str:
        objects = submission.folder / f"{job}.yaml"
        objects.write_text(_dumped(self._objects(submission, job, tasks)))
        file = _secret_file(submission)
        if not file.exists():
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as private:
                private.write(_dumped([secret(_secret(submission), self._variables(submission))]))
        apply = ["apply", "-f", str(file), "-f", str(objects)]
        if shutil.which("kubectl") is None:
            submission.add_job(job, tasks)
            raise EngineError(
                f"kubectl is not installed here. On a machine that has it, run\n"
                f"    {shlex.join(self._kubectl(*apply))}\n"
                f"Then collect the run: {command('plumbline', 'submit', '--attach', str(submission.run))}"
            )
        self._call(*apply)
        return job

    def states(self, submission: Tasks, jobs: Mapping[int, str]) -> dict[int, TaskState]:
        if not jobs or shutil.which("kubectl") is None:
            return {}
        which = f"{JOB_LABEL} in ({','.join(sorted({*jobs.values()}))})"
        told = self._call("get", f"{_RESOURCES[self._kind(submission)]},pods", "-l", which, "-o", "json")
        found = states_of(json.loads(told)["items"])
        return {task: found[job, task] for task, job in jobs.items() if (job, task) in found}

    def log(self, submission: Tasks, job: str, task: int) -> str:
        is_indexed = self._kind(submission) == "job"
        one = f"{INDEX_LABEL}={submission.tasks_of(job).index(task)}" if is_indexed else f"{TASK_LABEL}={task}"
        return shlex.join(self._kubectl("logs", "--tail=-1", "--prefix", "-l", f"{JOB_LABEL}={job},{one}"))

    def end(self, submission: Tasks) -> None:
        _secret_file(submission).unlink(missing_ok=True)
        with contextlib.suppress(EngineError, FileNotFoundError):
            self._call("delete", "secret", _secret(submission), "--ignore-not-found")

    def _objects(self, submission: Tasks, job: str, tasks: Sequence[int]) -> list[dict[str, Any]]:
        work, mount = submission.work, self._mount(submission)
        settings = PodSettings(
            image=self.image,
            claim=self.claim,
            mount=str(mount),
            folder=work.folder if Path(work.folder).is_relative_to(mount) else None,
            gpus=0 if work.accelerator == "cpu" else work.gpus,
            secret=_secret(submission),
            patch=self.pod,
        )
        return manifests(self._kind(submission), job, str(submission.run), tasks, work.nodes, settings)

    def _kind(self, submission: Tasks) -> str:
        return self.kind or ("job" if submission.work.nodes == 1 else "jobset")

    def _mount(self, submission: Tasks) -> Path:
        return Path(self.mount) if self.mount else submission.run.parent

    def _variables(self, submission: Tasks) -> dict[str, str]:
        user = {"HOME": "/tmp", "USER": "plumbline"}  # the image may not have this user, or a home for it
        token = {TOKEN: secrets.token_hex(32)} if submission.work.nodes > 1 else {}
        return {**user, **token, **self.environment}

    def _kubectl(self, *words: str) -> list[str]:
        return ["kubectl", *(("--namespace", self.namespace) if self.namespace else ()), *words]

    def _call(self, *words: str) -> str:
        asked = self._kubectl(*words)
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"{shlex.join(asked)} did not finish within {COMMAND_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise EngineError(f"{shlex.join(asked)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout


def _secret_file(submission: Tasks) -> Path:
    return submission.folder / "secret.yaml"


def _secret(submission: Tasks) -> str:
    return f"plumbline-{submission.run.name.lower()}"


def _dumped(objects: Sequence[Mapping[str, Any]]) -> str:
    # Convert through JSON, because YAML would write values that objects share as anchors and aliases.
    return str(_yaml().safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise PlanError("--engine kubernetes needs PyYAML: pip install 'torch-plumbline[kubernetes]'") from error
    return yaml
