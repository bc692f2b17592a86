"""The first process of a node whose subject starts its ranks itself: it calls the subject, and waits for the ranks.

It may be a rank itself, for example the only one of its node. Otherwise it writes how the call ended to a file beside
the ranks' evidence, which ``plumbline.launch.exit_reason`` reads.
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
from plumbline.worker.rank import call_subject, exit_after, prepare_process

LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS"),
)
"""Variables of launchers that start the ranks themselves. Here the subject starts them."""


def run(
    assignment: Assignment,
    subject: Subject,
    announce: Callable[[dict[str, Any]], None],
    address: Address,
    scratch: str,
) -> NoReturn:
    """Train with all ranks of a node. Does not return: the process ends here.

    The processes below this one register at ``address``, and put temporary files into the folder ``scratch``, which is
    removed after their end.
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
        place = {"launch": assignment.launch, "rank": assignment.rank}
        if here.recorder.steps:
            here.write_evidence(raised)
        else:
            evidence.write_rank(assignment.returned, here.recorder.trace(assignment.rank, raised))
        if raised is not None:
            announce({"event": "raised", **place})
        # Wait for the remaining children, as every Python program does at its end.
        exit_function: Callable[[], None] = multiprocessing.util._exit_function  # type: ignore[attr-defined]
        exit_function()
        announce({"event": "evidence", **place})
        return 0 if raised is None else 1

    exit_after(train)


def _announce_ends_of_children(assignment: Assignment, announce: Callable[[dict[str, Any]], None]) -> None:
    """Announce the exit code of each child when multiprocessing waits for it: the code can be read only once."""
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
