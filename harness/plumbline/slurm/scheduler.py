"""SLURM's batch scripts and commands: sbatch, squeue and, if the cluster has accounting, sacct."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from plumbline.core.errors import PlanError, PlumblineError


@dataclass(frozen=True)
class BatchScript:
    """The options of a job for sbatch, and what it runs.

    ``options`` are sbatch's, by their long names without dashes, None for one that takes no value; ``comments`` explain
    them, by the same names. ``modules`` are loaded, ``environment`` is set and ``commands`` are run before ``command``
    runs in ``folder``; commands are lines for the shell. The rest of the environment stays as SLURM has set it,
    including CUDA_VISIBLE_DEVICES.

    Raises:
        PlanError: an option or a variable cannot be written to a script.
    """

    options: Mapping[str, str | int | None]
    command: str
    folder: str
    modules: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise PlanError(f"sbatch has no option {name!r}: give its long name without dashes, as in mem=0")
            if re.search(r"[\n\"\\]", f"{value}{self.comments.get(name, '')}"):
                raise PlanError(f"sbatch's option {name} cannot be {value!r}: no quotes, backslashes or line breaks")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise PlanError(f"{name!r} is not a valid name for an environment variable")

    def text(self) -> str:
        lines = ["#!/usr/bin/env bash"]
        for name, value in self.options.items():
            if name in self.comments:
                lines.append(f"# {self.comments[name]}")
            lines.append(f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(str(value))}"))
        if self.modules:
            lines += ["", "# A batch shell has not read /etc/profile, which defines module."]
            lines += ["type module >/dev/null 2>&1 || . /etc/profile"]
            lines += [f"module load {shlex.quote(module)} || exit" for module in self.modules]
        lines += [""] if self.environment else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += ["", *self.commands] if self.commands else []
        lines += ["", f"cd {shlex.quote(self.folder)} || exit", f"exec {self.command}"]
        return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


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
        raise SchedulerError(
            f"{command[0]} did not end within {COMMAND_TIMEOUT_S:.0f} s: check that slurmctld is running"
        ) from error
    if done.returncode:
        raise SchedulerError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
