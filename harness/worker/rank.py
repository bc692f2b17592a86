"""The life of one rank: set the scene, train, leave the evidence, end."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from harness.subjects.declare import Subject
from harness.worker import evidence
from harness.worker.assignment import Assignment
from harness.worker.job import Job
from harness.worker.recorder import Recorder

_current: Job | None = None


def current_job() -> Job:
    """Return the job of this process, for scripts that are not handed it.

    Raises:
        RuntimeError: this process was not started by Plumbline.
    """
    if _current is None:
        raise RuntimeError("there is no current job: this process was not started by Plumbline")
    return _current


def run(assignment: Assignment, subject: Subject, announce: Callable[[dict[str, Any]], None]) -> None:
    """Train one rank and leave its evidence. Does not return: the process ends here.

    The evidence is written and announced before anything is shut down, and the process ends without running
    destructors, because in torch 2.13 a DDP object that outlives its process group may hang there for ever.
    """
    global _current
    status = 1
    try:
        _set_the_scene(assignment)
        recorder = Recorder(assignment.sketch_above)
        recorder.install()
        _current = Job(assignment, recorder)
        error, failed_at = None, None
        try:
            subject.train(_current)
        except BaseException as raised:
            failed_at = time.time()
            error = f"{type(raised).__name__}: {raised}".strip()
            traceback.print_exc()
        evidence.write(assignment.evidence, recorder.trace(assignment.rank, error, failed_at))
        announce({"event": "evidence", "launch": assignment.launch, "rank": assignment.rank})
        status = 0 if error is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _set_the_scene(assignment: Assignment) -> None:
    os.setsid()
    log = os.open(assignment.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(assignment.environment)
    torch.set_num_threads(1)
    # Every rank another seed, on purpose: what must be equal on all ranks must be made equal by the trainer.
    torch.default_generator.manual_seed(1 + assignment.rank)
    if assignment.cell.accelerator == "cuda":
        torch.cuda.manual_seed_all(1 + assignment.rank)
