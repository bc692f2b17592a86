"""The life of one rank: set the scene, train, leave the evidence, end."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from harness.evidence.rank_file import RankFile
from harness.subjects.declare import Subject
from harness.worker.arithmetic import compute_as_named
from harness.worker.assignment import Assignment, stack_beside
from harness.worker.exception_text import calls_in, in_words
from harness.worker.job import Job
from harness.worker.recording.child_recorder import member
from harness.worker.recording.late_evidence import answer_question, block_question
from harness.worker.recording.process_groups import keep_process_groups
from harness.worker.recording.recorder import Recorder
from harness.worker.timing.stopwatch import Stopwatch

_current: Job | None = None


def current_job() -> Job:
    """Return the job of this process, for scripts that are not handed it.

    A process that the subject has started by itself joins its node's recording here, if it has not yet.

    Raises:
        RuntimeError: this process was started neither by Plumbline nor by a subject under test.
    """
    return _current or member().job


def run(
    assignment: Assignment, subject: Subject, announce: Callable[[dict[str, Any]], None], done: MutableSequence[int]
) -> None:
    """Train one rank and leave its evidence. Does not return: the process ends here.

    ``done`` is memory that outlives this process: eight bytes, little-endian, for how many steps it has done.

    The evidence is written and announced before anything is shut down, and the process ends without running
    destructors, because a teardown may hang: see :mod:`harness.worker.recording.process_groups`. What has been
    recorded is also written before the subject destroys its process group, and when the launcher asks a late rank.
    """
    global _current
    status = 1
    try:
        set_the_scene(assignment)
        recorder = Stopwatch(assignment, done) if assignment.gate else Recorder(assignment.sketch_above, done)
        recorder.install()
        file = RankFile(assignment.evidence, lambda: recorder.trace(assignment.rank, None, None))
        place = {"launch": assignment.launch, "rank": assignment.rank}

        def write_so_far() -> None:
            if recorder.has_steps:
                file.write_so_far()
                announce({"event": "so_far", **place})

        def before_destruction() -> None:
            with suppress(OSError):  # the whole evidence comes later, and says what is in the way
                write_so_far()

        keep_process_groups(before_destruction)
        answer_question(write_so_far)
        _current = Job(assignment, recorder)
        error, failed_at, stack = None, None, ""
        try:
            subject.train(_current)
        except BaseException as raised:
            failed_at = time.time()
            error, stack = in_words(raised), calls_in(raised)
            with suppress(Exception):  # a subject may have closed what it prints to
                traceback.print_exc()
        trace = replace(recorder.trace(assignment.rank, error, failed_at), stack=stack)
        try:
            file.finish(trace)
        except OSError as broken:
            announce({"event": "unwritten", **place, "why": str(broken)[:300]})
            raise
        announce({"event": "evidence", **place})
        status = 0 if error is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def set_the_scene(assignment: Assignment) -> None:
    """Make a forked process the rank of ``assignment``, in a session of its own."""
    os.setsid()
    block_question()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Where it was when it died, or when it was asked. Not in the log, which belongs to the subject.
    stack = os.open(stack_beside(assignment.log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.update(assignment.environment)
    torch.set_num_threads(1)
    # Every rank another seed, on purpose: what must be equal on all ranks must be made equal by the trainer.
    torch.default_generator.manual_seed(1 + assignment.rank)
    if assignment.cell.accelerator == "cuda":
        torch.cuda.manual_seed_all(1 + assignment.rank)
        if not assignment.gate:  # what is timed is timed as users have it
            compute_as_named()
