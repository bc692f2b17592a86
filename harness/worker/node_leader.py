"""The first process of a node whose subject starts its ranks by itself: it calls the subject, and waits for all below.

It may be a rank itself, as where there is one a node. Else what it leaves says how the call ended, beside the ranks'
evidence, and whoever reads the launch makes of it what it is worth.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.evidence import rank_file as evidence
from harness.subjects.declare import Subject
from harness.worker.assignment import Assignment
from harness.worker.child_registry import Address
from harness.worker.rank import set_the_scene
from harness.worker.recording.child_recorder import lead

FROM_OTHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS"),
)
"""Variables by which a launcher says that it has started the ranks. Nobody has."""


def run(
    assignment: Assignment,
    subject: Subject,
    announce: Callable[[dict[str, Any]], None],
    address: Address,
    scratch: str,
) -> None:
    """Train with all ranks of a node. Does not return: the process ends here.

    ``address`` is where the fork server hears of processes below this one; ``scratch`` is a folder for their temporary
    files, which goes when they have gone.
    """
    status = 1
    try:
        set_the_scene(assignment)
        _forget_launchers()
        _use_for_temporary_files(scratch)
        _let_scripts_import_the_harness()
        _tell_how_children_end(assignment, announce)
        here = lead(assignment, address)
        raised = None
        try:
            subject.train(here.job)
        except BaseException as error:
            raised = error
            with suppress(Exception):  # a subject may have closed what it prints to
                traceback.print_exc()
        place = {"launch": assignment.launch, "rank": assignment.rank}
        if here.recorder.steps:
            here.leave_evidence(raised)
        else:
            evidence.write_rank(assignment.returned, here.trace(assignment.rank, raised))
        if raised is not None:
            announce({"event": "raised", **place})
        # As at the end of any Python program: children that nobody has waited for are waited for now.
        multiprocessing.util._exit_function()
        announce({"event": "evidence", **place})
        status = 0 if raised is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_launchers() -> None:
    for name in list(os.environ):
        if name in FROM_OTHERS or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def _use_for_temporary_files(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None


def _let_scripts_import_the_harness() -> None:
    path = str(Path(__file__).with_name("path"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, path)


def _tell_how_children_end(assignment: Assignment, announce: Callable[[dict[str, Any]], None]) -> None:
    """Announce how a child ended, whenever multiprocessing asks for one; nobody else can ask."""
    waitpid, first = os.waitpid, os.getpid()

    def telling(pid: int, options: int) -> tuple[int, int]:
        ended, status = waitpid(pid, options)
        if ended and os.getpid() == first:
            code = os.waitstatus_to_exitcode(status)
            announce(
                {"event": "reaped", "launch": assignment.launch, "rank": assignment.rank, "pid": ended, "code": code}
            )
        return ended, status

    os.waitpid = telling
