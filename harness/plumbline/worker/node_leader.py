"""The first process of a node whose subject starts its ranks by itself: it calls the subject, and waits for all below.

It may be a rank itself, as where there is one a node. Otherwise it writes how the call ended to a file beside the
ranks' evidence, which ``plumbline.launch.node_launch`` interprets.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from plumbline.evidence import rank_file as evidence
from plumbline.subjects.declare import Subject
from plumbline.worker.assignment import Assignment
from plumbline.worker.child_registry import Address
from plumbline.worker.node_member import lead
from plumbline.worker.rank import call, exit_after, prepare_process

LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS"),
)
"""Variables by which a launcher says that it has started the ranks, which is not the case here."""


def run(
    assignment: Assignment,
    subject: Subject,
    announce: Callable[[dict[str, Any]], None],
    address: Address,
    scratch: str,
) -> NoReturn:
    """Train with all ranks of a node. Does not return: the process ends here.

    ``address`` is that of the fork server's registry of processes below this one; ``scratch`` is a folder for their
    temporary files, which is removed when they have ended.
    """

    def train() -> int:
        prepare_process(assignment)
        _forget_launchers()
        _use_for_temporary_files(scratch)
        _let_scripts_import_the_harness()
        _announce_ends_of_children(assignment, announce)
        here = lead(assignment, address)
        raised = call(subject, here.job)
        place = {"launch": assignment.launch, "rank": assignment.rank}
        if here.recorder.steps:
            here.write_evidence(raised)
        else:
            evidence.write_rank(assignment.returned, here.recorder.trace(assignment.rank, raised))
        if raised is not None:
            announce({"event": "raised", **place})
        # As at the end of any Python program: children that nobody has waited for are waited for now.
        exit_function: Callable[[], None] = multiprocessing.util._exit_function  # type: ignore[attr-defined]
        exit_function()
        announce({"event": "evidence", **place})
        return 0 if raised is None else 1

    exit_after(train)


def _forget_launchers() -> None:
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def _use_for_temporary_files(folder: str) -> None:
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None


def _let_scripts_import_the_harness() -> None:
    path = str(Path(__file__).with_name("path"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, path)


def _announce_ends_of_children(assignment: Assignment, announce: Callable[[dict[str, Any]], None]) -> None:
    """Announce how a child ended, whenever multiprocessing waits for one: a child's exit code can be read once."""
    waitpid, first = os.waitpid, os.getpid()

    def announcing(pid: int, options: int) -> tuple[int, int]:
        ended, status = waitpid(pid, options)
        if ended and os.getpid() == first:
            code = os.waitstatus_to_exitcode(status)
            announce(
                {"event": "reaped", "launch": assignment.launch, "rank": assignment.rank, "pid": ended, "code": code}
            )
        return ended, status

    os.waitpid = announcing
