"""The manifests of tasks, as plain objects: an indexed Job for tasks of one node, else a JobSet or PyTorchJob for each.

Every pod runs ``python3 -m plumbline.submit.pod`` and finds what it is to do on the volume. A pod of several nodes gets
the variables by which torchrun knows its place (PET_…): a JobSet's from its manifest, a PyTorchJob's from its operator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("job", "jobset", "pytorchjob")

JOB_LABEL, TASK_LABEL = "plumbline-job", "plumbline-task"
"""Labels of objects and of their pods: the job by its name and, where it is one object a task, the task's number."""

TASKS = "plumbline-tasks"
"""The annotation with an object's tasks, in the order of its indices."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""The label, and the annotation, of a pod of an indexed Job with its index."""

PORT = 23456
"""The port of torchrun's store on a task's first pod; the two after it are Plumbline's."""

TTL_S = 86_400
"""Seconds for which a finished object is kept, so that its state and its logs can be read."""

_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
"""The condition of a pod that was preempted, evicted or drained: it says nothing about the run."""


@dataclass(frozen=True)
class PodSettings:
    """What every pod of a run has in common.

    ``claim`` is mounted at ``mount``. ``gpus`` are the devices to request, 0 for none. ``secret`` is the Secret whose
    keys are its variables. ``patch`` is merged into its spec, as a JSON merge patch (RFC 7386).
    """

    image: str
    claim: str
    mount: str
    folder: str | None
    gpus: int
    secret: str
    patch: Mapping[str, Any] = field(default_factory=dict)


def secret(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the Secret with the variables of every pod."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(values)}


def manifests(
    kind: str, job: str, run: str, tasks: Sequence[int], nodes: int, settings: PodSettings
) -> list[dict[str, Any]]:
    """Return the objects that run ``tasks`` of the submission in ``run``: one for all, or one for each."""
    if kind == "job":
        return [_indexed_job(job, run, tasks, settings)]
    make = {"jobset": _jobset, "pytorchjob": _pytorchjob}[kind]
    return [make(job, run, task, nodes, settings) for task in tasks]


def _indexed_job(job: str, run: str, tasks: Sequence[int], settings: PodSettings) -> dict[str, Any]:
    labels = {JOB_LABEL: job}
    spec = {
        "completionMode": "Indexed",
        "completions": len(tasks),
        "parallelism": len(tasks),
        # A task that fails does not end the others, and a pod that takes its place goes on with what is left.
        "backoffLimitPerIndex": 1,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}]},
        "ttlSecondsAfterFinished": TTL_S,
        "template": _pod(run, tasks, labels, [], settings),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, tasks, labels), "spec": spec}


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
        # Nodes train together, so all of them start again: after a disruption always, else once.
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
    # ExitCode: a pod that a signal ended is made again, one that failed by itself ends the job.
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
        "name": "pytorch",  # the name by which the operator of PyTorchJobs knows the container
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
        # What it writes to the volume belongs to who submitted it.
        "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {"metadata": {"labels": dict(labels)}, "spec": merged(spec, settings.patch)}


def merged(value: Any, patch: Any) -> Any:
    """Return a JSON value with a merge patch applied: objects are merged, None removes, all else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(value) if isinstance(value, Mapping) else {}
    for name, change in patch.items():
        if change is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), change)
    return found
