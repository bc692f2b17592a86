"""Reads the states of tasks from their objects and pods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from plumbline.submit.engine import Phase, TaskState
from plumbline.submit.kubernetes.manifests import INDEX_LABEL, JOB_LABEL, TASK_LABEL, TASKS

_ENDED = ("Complete", "Completed", "Succeeded", "Failed")
"""The conditions of a Job, a JobSet or a PyTorchJob that has ended."""


def states_of(objects: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], TaskState]:
    """Return the states of tasks by job and number, from the objects with the jobs' label and their pods."""
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
    """Return how a task ended, None if it has not. An indexed Job reports each index before the whole Job ends."""
    for name, field in (("Complete", "completedIndexes"), ("Failed", "failedIndexes")):
        if index in set(_indices(status.get(field) or "")):
            return TaskState(name, Phase.ENDED)
    for condition in status.get("conditions") or ():
        if condition["type"] in _ENDED and condition["status"] == "True":
            return TaskState(condition["type"], Phase.ENDED, condition.get("message", ""))
    return None


def _indices(text: str) -> Iterator[int]:
    """Yield the indices in a Job's status, such as ``1,3-5``."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _live(pods: Iterable[Mapping[str, Any]]) -> TaskState:
    live = [pod["status"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
    waiting = [status for status in live if status["phase"] == "Pending"]
    if live and not waiting:
        return TaskState("Running", Phase.LIVE)
    return TaskState("Pending", Phase.LIVE, next(filter(None, map(_reason, waiting)), ""))


def _reason(status: Mapping[str, Any]) -> str:
    """Return what a pending pod's container waits for, or why the pod has no node."""
    for container in status.get("containerStatuses") or ():
        waits = container.get("state", {}).get("waiting", {})
        if waits.get("reason", "ContainerCreating") != "ContainerCreating":
            return ": ".join(filter(None, (waits["reason"], waits.get("message", ""))))
    unmet = (one for one in status.get("conditions") or () if one["status"] == "False" and one.get("message"))
    return next((one["message"] for one in unmet if one["type"] == "PodScheduled"), "")
