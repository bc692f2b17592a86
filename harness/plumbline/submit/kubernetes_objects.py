"""Builds the manifests for Kubernetes, and reads the states of the resulting objects.

All single-node tasks share one indexed Job; each multi-node task is a JobSet or a PyTorchJob.
Every pod runs ``python3 -m plumbline.submit.pod``, which finds its task on the volume. If a task has several nodes, its
pods get torchrun's variables (PET_…): from the manifest of a JobSet, or from the operator of a PyTorchJob.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbline.submit.engine import Phase, TaskState

KINDS = ("job", "jobset", "pytorchjob")
JOB_LABEL, TASK_LABEL = "plumbline-job", "plumbline-task"
"""Labels of objects and their pods: the job's name and, if each task has its own object, the task's number."""

TASKS = "plumbline-tasks"  # the annotation with the tasks of an object, in the order of its indices
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""The label and annotation that hold a pod's index in an indexed Job."""

PORT = 23456  # The port of torchrun's store on the first pod of a task. Plumbline uses the next two.
TTL_S = 86_400  # seconds for which finished objects are kept, so that their states and logs can be read
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
"""The condition of a pod that was preempted, evicted or drained."""


@dataclass(frozen=True)
class PodSettings:
    """The settings of every pod of a run; ``patch`` is merged into its spec, as a JSON merge patch (RFC 7386)."""

    image: str
    claim: str
    mount: str
    folder: str | None
    gpus: int
    secret: str
    patch: Mapping[str, Any] = field(default_factory=dict)


def secret(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(values)}


def manifests(
    kind: str, job: str, run: str, tasks: Sequence[int], nodes: int, settings: PodSettings
) -> list[dict[str, Any]]:
    """Return the objects that run ``tasks`` of the submission in ``run``: one for all tasks, or one per task."""
    if kind != "job":
        make = {"jobset": _jobset, "pytorchjob": _pytorchjob}[kind]
        return [make(job, run, task, nodes, settings) for task in tasks]
    labels = {JOB_LABEL: job}
    spec = {
        "completionMode": "Indexed",
        "completions": len(tasks),
        "parallelism": len(tasks),
        # A failed task does not end the others. The pod that replaces it continues with the missing cells.
        "backoffLimitPerIndex": 1,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}]},
        "ttlSecondsAfterFinished": TTL_S,
        "template": _pod(run, tasks, labels, [], settings),
    }
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, tasks, labels), "spec": spec}]


def _jobset(job: str, run: str, task: int, nodes: int, settings: PodSettings) -> dict[str, Any]:
    name, labels = f"{job}-{task}", {JOB_LABEL: job, TASK_LABEL: str(task)}
    place = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_LABEL}']"}}
    variables: list[Mapping[str, Any]] = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NODE_RANK", "valueFrom": place},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-nodes-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    ranks = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": _DISRUPTED}]},
        "template": _pod(run, [task], labels, variables, settings),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # Nodes train together, so all of them restart: always after a disruption, otherwise once.
        "failurePolicy": {
            "maxRestarts": 1,
            "rules": [
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "ttlSecondsAfterFinished": TTL_S,
        "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": ranks}}],
    }
    metadata = _metadata(name, [task], labels)
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _pytorchjob(job: str, run: str, task: int, nodes: int, settings: PodSettings) -> dict[str, Any]:
    labels = {JOB_LABEL: job, TASK_LABEL: str(task)}
    template = _pod(run, [task], labels, [], settings)
    del template["spec"]["restartPolicy"]  # the operator sets it
    # ExitCode: a pod that a signal ended is created again, and a pod that failed by itself ends the job.
    replicas = {"Master": 1, "Worker": nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
        for role, count in replicas.items()
        if count
    }
    policy = {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": TTL_S, "backoffLimit": 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(f"{job}-{task}", [task], labels),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": specs},
    }


def _metadata(name: str, tasks: Sequence[int], labels: Mapping[str, str]) -> dict[str, Any]:
    own = {"app.kubernetes.io/name": "plumbline", **labels}
    return {"name": name, "labels": own, "annotations": {TASKS: " ".join(map(str, tasks))}}


def _pod(
    run: str,
    tasks: Sequence[int],
    labels: Mapping[str, str],
    variables: Sequence[Mapping[str, Any]],
    settings: PodSettings,
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator of PyTorchJobs looks for a container with this name
        "image": settings.image,
        "command": ["python3", "-m", "plumbline.submit.pod"],
        "args": [run, *map(str, tasks)],
        "env": list(variables),
        "envFrom": [{"secretRef": {"name": settings.secret}}],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": [{"name": "runs", "mountPath": settings.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if settings.folder:
        container["workingDir"] = settings.folder
    if settings.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": settings.gpus}}
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # The user who submitted the run owns the files on the volume.
        "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {"metadata": {"labels": dict(labels)}, "spec": merged(spec, settings.patch)}


def merged(value: Any, patch: Any) -> Any:
    """Apply a JSON merge patch: objects are merged, None removes a key, any other value replaces the old one."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(value) if isinstance(value, Mapping) else {}
    for name, change in patch.items():
        if change is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), change)
    return found


_ENDED = ("Complete", "Completed", "Succeeded", "Failed")
"""The conditions of a Job, a JobSet or a PyTorchJob that has ended."""


def states_of(objects: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], TaskState]:
    """Return the states of tasks by job and task number. ``objects`` are those with the jobs' label, and their pods."""
    every = list(objects)
    pods = [one for one in every if one["kind"] == "Pod"]
    found: dict[tuple[str, int], TaskState] = {}
    for one in every:
        metadata = one["metadata"]
        if one["kind"] == "Pod" or TASKS not in metadata.get("annotations", {}):
            continue
        job = metadata["labels"][JOB_LABEL]
        for index, task in enumerate(map(int, metadata["annotations"][TASKS].split())):
            own = [pod for pod in pods if _is_of(pod["metadata"].get("labels", {}), job, task, index)]
            found[job, task] = _ended(one.get("status", {}), index) or _live(own)
    return found


def _is_of(labels: Mapping[str, str], job: str, task: int, index: int) -> bool:
    if labels.get(JOB_LABEL) != job:
        return False
    return labels[TASK_LABEL] == str(task) if TASK_LABEL in labels else labels.get(INDEX_LABEL) == str(index)


def _ended(status: Mapping[str, Any], index: int) -> TaskState | None:
    """Return how a task ended, or None if it has not. An indexed Job reports each index before the whole Job ends."""
    for name, key in (("Complete", "completedIndexes"), ("Failed", "failedIndexes")):
        for part in filter(None, (status.get(key) or "").split(",")):
            first, _, last = part.partition("-")
            if int(first) <= index <= int(last or first):
                return TaskState(name, Phase.ENDED)
    for condition in status.get("conditions") or ():
        if condition["type"] in _ENDED and condition["status"] == "True":
            return TaskState(condition["type"], Phase.ENDED, condition.get("message", ""))
    return None


def _live(pods: Iterable[Mapping[str, Any]]) -> TaskState:
    live = [pod["status"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    waiting = [status for status in live if status["phase"] == "Pending"]
    if live and not waiting:
        return TaskState("Running", Phase.LIVE)
    return TaskState("Pending", Phase.LIVE, next(filter(None, map(_reason, waiting)), ""))


def _reason(status: Mapping[str, Any]) -> str:
    for container in status.get("containerStatuses") or ():
        waits = container.get("state", {}).get("waiting", {})
        if waits.get("reason", "ContainerCreating") != "ContainerCreating":
            return ": ".join(filter(None, (waits["reason"], waits.get("message", ""))))
    unmet = (one for one in status.get("conditions") or () if one["status"] == "False" and one.get("message"))
    return next((one["message"] for one in unmet if one["type"] == "PodScheduled"), "")
