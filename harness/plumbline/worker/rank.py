"""The processes that the fork server forks: ranks, and the first process of a node that starts its own ranks."""

from __future__ import annotations

import copyreg
import mmap
import multiprocessing.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from plumbline.devices.calls import compute_as_named, seed_all
from plumbline.evidence.trace_file import RankFile, write_rank
from plumbline.subjects.declare import Subject
from plumbline.worker.assignment import Assignment, stack_beside
from plumbline.worker.child_registry import Address
from plumbline.worker.job import Job
from plumbline.worker.node_member import current_member, lead
from plumbline.worker.processes import dump_stacks_on_request
from plumbline.worker.recorder.late_evidence import answer_requests, block_requests, keep_process_groups
from plumbline.worker.recorder.recorder import Recorder, StepHooks
from plumbline.worker.timing.stopwatch import Stopwatch

_current: Job | None = None


def current_job() -> Job:
    """Return the job of this process, for scripts, which do not get it as an argument.

    A process that the subject has started joins the launch of its node here, if it has not joined yet.

    Raises:
        RuntimeError: Neither Plumbline nor a subject under test has started this process.
    """
    return _current or current_member().job


# A job that is pickled for a process that the subject starts is unpickled as that process's own job.
copyreg.pickle(Job, lambda _: (current_job, ()))


def run(
    assignment: Assignment, subject: Subject, announce: Callable[[dict[str, Any]], None], done: mmap.mmap
) -> NoReturn:
    """Train one rank and write its evidence. Does not return: the process ends here.

    ``done`` is memory that outlives this process, for the number of completed steps. The process ends without running
    destructors, because a teardown may hang: see :mod:`plumbline.worker.recorder.late_evidence`.
    """

    def count(steps: int) -> None:
        done[:8] = steps.to_bytes(8, "little")

    def record_training() -> int:
        global _current
        prepare_process(assignment)
        recorder: StepHooks
        recorder = (
            Stopwatch(assignment, count) if assignment.barrier_socket else Recorder(assignment.tensor_store(), count)
        )
        recorder.install()
        file = RankFile(assignment.evidence, lambda: recorder.trace(assignment.rank))

        def write_so_far() -> None:
            if recorder.steps:
                file.write_so_far()
                announce({"event": "so_far", **assignment.ids})

        def before_destruction() -> None:
            with suppress(OSError):  # writing the whole evidence later will report the error
                write_so_far()

        keep_process_groups(before_destruction)
        answer_requests(write_so_far)
        _current = Job(assignment, recorder)
        raised = call_subject(subject, _current)
        try:
            file.finish(recorder.trace(assignment.rank, raised))
        except OSError as error:
            announce({"event": "unwritten", **assignment.ids, "why": str(error)[:300]})
            raise
        announce({"event": "evidence", **assignment.ids})
        return 0 if raised is None else 1

    exit_after(record_training)


def call_subject(subject: Subject, job: Job) -> BaseException | None:
    """Train ``job``; print and return what the subject raised."""
    try:
        subject.train(job)
    except BaseException as error:
        with suppress(Exception):  # the subject may have closed standard error
            traceback.print_exc()
        return error
    return None


def exit_after(train: Callable[[], int]) -> NoReturn:
    """Exit with the code that ``train`` returns, or 1 if it raises, without running destructors."""
    status = 1
    try:
        status = train()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def prepare_process(assignment: Assignment) -> None:
    os.setsid()
    block_requests()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Stacks do not go into the log, which belongs to the subject.
    stack = os.open(stack_beside(assignment.log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    dump_stacks_on_request(stack)
    os.environ.update(assignment.environment)
    torch.set_num_threads(1)
    # Each rank has a different seed on purpose: the trainer has to make ranks equal where that matters.
    torch.default_generator.manual_seed(1 + assignment.rank)
    if assignment.cell.accelerator != "cpu":
        seed_all(assignment.cell.accelerator, 1 + assignment.rank)
        if not assignment.barrier_socket:  # timed ranks keep the user's settings
            compute_as_named()


LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS"),
)
"""Variables of launchers that start the ranks themselves. Here the subject starts them."""


def lead_node(
    assignment: Assignment,
    subject: Subject,
    announce: Callable[[dict[str, Any]], None],
    address: Address,
    scratch: str,
) -> NoReturn:
    """Train with all ranks of a node, which the subject starts itself. Does not return: the process ends here.

    This process calls the subject, and waits for the ranks. It may be a rank itself, for example the only one of its
    node. Otherwise it writes how the call ended to a file beside the ranks' evidence, which
    ``plumbline.launch.cell_launch`` reads. The processes below this one register at ``address``, and put temporary
    files into the folder ``scratch``, which is removed after their end.
    """

    def train() -> int:
        prepare_process(assignment)
        for name in list(os.environ):
            if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
                del os.environ[name]
        os.environ["TMPDIR"], tempfile.tempdir = scratch, None
        path = str(Path(__file__).with_name("path"))  # so that scripts can import Plumbline
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, path)
        _announce_ends_of_children(assignment, announce)
        here = lead(assignment, address)
        raised = call_subject(subject, here.job)
        if here.recorder.steps:
            here.write_evidence(raised)
        else:
            write_rank(assignment.returned, here.recorder.trace(assignment.rank, raised))
        if raised is not None:
            announce({"event": "raised", **assignment.ids})
        # Wait for the remaining children, as every Python program does at its end.
        exit_function: Callable[[], None] = multiprocessing.util._exit_function  # type: ignore[attr-defined]
        exit_function()
        announce({"event": "evidence", **assignment.ids})
        return 0 if raised is None else 1

    exit_after(train)


def _announce_ends_of_children(assignment: Assignment, announce: Callable[[dict[str, Any]], None]) -> None:
    """Announce the exit code of each child when multiprocessing waits for it: the code can be read only once."""
    waitpid, first = os.waitpid, os.getpid()

    def announcing(pid: int, options: int) -> tuple[int, int]:
        ended, status = waitpid(pid, options)
        if ended and os.getpid() == first:
            code = os.waitstatus_to_exitcode(status)
            announce({"event": "reaped", **assignment.ids, "pid": ended, "code": code})
        return ended, status

    os.waitpid = announcing
