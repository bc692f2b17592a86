"""What is asked of SLURM, and what it answers: sbatch, squeue and, where the cluster keeps accounts, sacct."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.errors import PlumblineError

PATIENCE = 60.0
"""Seconds in which SLURM has to answer."""

LIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
                  "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SPECIAL_EXIT", "RESV_DEL_HOLD"})  # fmt: skip
NOBODYS_FAULT = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"})
"""How a task ends that would have gone on elsewhere, or at another time."""


class SchedulerError(PlumblineError):
    """SLURM is not here, does not answer, or refused."""


@dataclass(frozen=True)
class TaskState:
    """Where an array task stands. ``reason`` is SLURM's for waiting; ``name`` is "" where nobody knows it any more."""

    name: str
    reason: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it may still do something."""
        return self.name in LIVE

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody wanted it to end."""
        return self.name.startswith("CANCELLED")


GONE = TaskState("")


def sbatch(script: str, array: str | None = None) -> int:
    """Send a batch script, as a job array over the indices ``array`` ("0,2-3"); return the job's id.

    Raises:
        SchedulerError: it was not taken.
    """
    over = [] if array is None else [f"--array={array}"]
    # Its own sbatch may be run inside a job: what that was given is not for this one.
    answer = _ask(["sbatch", "--parsable", *over], script)
    return int(answer.strip().partition(";")[0])


def states(jobs: Iterable[int]) -> dict[tuple[int, int], TaskState]:
    """Return how the tasks of job arrays stand, by job and index; a task that SLURM has forgotten is not in it.

    Raises:
        SchedulerError: SLURM does not answer.
    """
    wanted = sorted(set(jobs))
    found: dict[tuple[int, int], TaskState] = {}
    for job in wanted:
        try:
            told = _ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%F|%K|%T|%r"])
        except SchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            continue  # it ended some minutes ago
        for line in told.splitlines():
            number, index, name, reason = line.strip().split("|", 3)
            if index.isdecimal():
                found[int(number), int(index)] = TaskState(name, "" if reason == "None" else reason)
    forgotten = [job for job in wanted if not any(number == job for number, _ in found)]
    return found | _accounts(forgotten)


def _accounts(jobs: list[int]) -> dict[tuple[int, int], TaskState]:
    """Return what the cluster's accounts say of tasks that squeue has forgotten; nothing where it keeps none."""
    if not jobs or shutil.which("sacct") is None:
        return {}
    try:
        told = _ask(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(map(str, jobs))])
    except SchedulerError:
        return {}
    found = {}
    for line in told.splitlines():
        place, _, state = line.strip().partition("|")
        job, _, index = place.partition("_")
        if job.isdecimal() and index.isdecimal():
            found[int(job), int(index)] = TaskState(state)
    return found


def _ask(command: list[str], said: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError as error:
        raise SchedulerError(f"there is no {command[0]} here: submit from a machine of the SLURM cluster") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{command[0]} did not answer in {PATIENCE:.0f} s: is SLURM's controller up?") from error
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
