"""SLURM's commands and their output: sbatch, squeue and, where the cluster has accounting, sacct."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from plumbline.core.errors import PlumblineError

COMMAND_TIMEOUT_S = 60.0

LIVE = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
                  "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SPECIAL_EXIT", "RESV_DEL_HOLD"})  # fmt: skip
INTERRUPTED = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"})
"""States of tasks that the cluster ended for reasons of its own: they may succeed elsewhere, or later."""


class SchedulerError(PlumblineError):
    """A command of SLURM does not exist, did not end in time, or failed."""


class JobState(NamedTuple):
    """The state of an array task by SLURM's name; ``reason`` is why it is pending."""

    name: str
    reason: str = ""


def sbatch(script: str, array: str | None = None) -> int:
    """Submit a batch script, as a job array over the indices ``array`` ("0,2-3"); return the job's id.

    Raises:
        SchedulerError: sbatch failed.
    """
    over = [] if array is None else [f"--array={array}"]
    output = _run(["sbatch", "--parsable", *over], script)
    return int(output.strip().partition(";")[0])


def states(jobs: Iterable[int]) -> dict[tuple[int, int], JobState]:
    """Return the states of the tasks of job arrays by job and index, without tasks that SLURM has forgotten.

    Raises:
        SchedulerError: squeue failed.

    """
    wanted = sorted(set(jobs))
    found: dict[tuple[int, int], JobState] = {}
    for job in wanted:
        try:
            output = _run(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%F|%K|%T|%r"])
        except SchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            continue  # it ended some minutes ago
        for line in output.splitlines():
            number, index, name, reason = line.strip().split("|", 3)
            if index.isdecimal():
                found[int(number), int(index)] = JobState(name, "" if reason == "None" else reason)
    forgotten = [job for job in wanted if not any(number == job for number, _ in found)]
    return found | _accounts(forgotten)


def _accounts(jobs: list[int]) -> dict[tuple[int, int], JobState]:
    if not jobs or shutil.which("sacct") is None:
        return {}
    try:
        output = _run(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(map(str, jobs))])
    except SchedulerError:
        return {}
    found = {}
    for line in output.splitlines():
        place, _, state = line.strip().partition("|")
        job, _, index = place.partition("_")
        if job.isdecimal() and index.isdecimal():
            found[int(job), int(index)] = JobState(state)
    return found


def _run(command: list[str], stdin: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise SchedulerError(
            f"{command[0]} is not installed here: submit from a machine of the SLURM cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{command[0]} did not end within {COMMAND_TIMEOUT_S:.0f} s: is slurmctld up?") from error
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
