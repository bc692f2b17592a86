"""The program of each pod of ``plumbline submit --engine kubernetes``: one node of one task.

    python3 -m plumbline.submit.pod RUN TASK [TASK …]

RUN is the run's folder on the volume. A pod of an indexed Job has the task at its index, JOB_COMPLETION_INDEX. If a
task has several nodes, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT give this node's place. Each node starts a
torchrun with the fork server of its ranks; the first one also starts the run.

The exit code is 0 even if cells are red. A pod that replaces another one examines only the cells that are missing on
the volume.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from plumbline.core.invocation import suites
from plumbline.submit.follow import collect
from plumbline.submit.submission import NoSubmissionError, Submission

MEETING_TIMEOUT = timedelta(minutes=30)
"""How long a node waits for the other nodes of its task, which may still be pulling their image."""

RESTARTS = 3  # the number of times that torchrun may restart a node's lost fork server
_LEAVE_GRACE_S = 30.0  # time for torchrun to end after the run, before it is terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the missing cells of this pod's task; return the exit code of the container."""
    parser = argparse.ArgumentParser(prog="plumbline.submit.pod", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, on the volume")
    parser.add_argument("tasks", type=int, nargs="+", metavar="TASK", help="the tasks, in the order of the indices")
    options = parser.parse_args(arguments)
    # The first process of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        submission = Submission.load(options.run)
    except NoSubmissionError as error:
        print(f"{error}. Check that the submitting machine mounts this volume at the same path.", file=sys.stderr)
        return 2
    alone = submission.work.nodes == 1
    task = options.tasks[int(os.environ.get("JOB_COMPLETION_INDEX", "0")) if alone else 0]
    left = cells_left(submission, task)
    if not left:
        return 0
    return run_cells(submission, task, left) if alone else _take_part(submission, task, left)


def cells_left(submission: Submission, task: int) -> list[str]:
    """Return the pytest node ids of a task's cells that are not complete in any run on the volume."""
    wanted = submission.selection(task).read_text().splitlines()
    done = collect(submission).cells
    return [cell.nodeid for cell in submission.cells if cell.nodeid in wanted and cell.cell not in done]


def run_cells(submission: Submission, task: int, cells: Sequence[str], *launcher: str) -> int:
    """Run pytest over ``cells`` with a launcher and its options (default: local); return 0 if all of them ended."""
    work = submission.work

    def here(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(text.replace(work.suites, str(suites())) for text in texts)

    name, *further = launcher or ("local",)
    words = replace(work, python=sys.executable, flags=here(work.flags)).words(name)
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        file = Path(folder) / "cells.txt"
        file.write_text("".join(f"{cell}\n" for cell in here(cells)))
        # The image's folders may be read-only.
        words += [*further, "-p", "no:cacheprovider", "--report-dir", str(submission.part(task)), f"@{file}"]
        with _child(words) as run:
            code = run.wait()
    return 0 if code == 1 else code


def _take_part(submission: Submission, task: int, cells: Sequence[str]) -> int:
    """Meet the other nodes, then serve ranks until the run has ended; the first node also runs pytest."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    nodes, rank = submission.work.nodes, int(os.environ["PET_NODE_RANK"])
    host, port = os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"])
    # Keep the store until the end, because a node that replaces a lost one meets the others there, too. The first node
    # listens at its own address alone.
    listener = socket.create_server((socket.gethostbyname(host), port + 1)).detach() if rank == 0 else None
    meeting = TCPStore(host, port + 1, nodes, rank == 0, MEETING_TIMEOUT, master_listen_fd=listener)
    launcher = f"{host}:{port + 2}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1"]
    torchrun += ["--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)]
    server = ["-m", "plumbline.worker", "--connect", launcher, "--as-node", "${GROUP_RANK}"]
    server.append(submission.work.subjects[0])
    with _child([*torchrun, "--max-restarts", str(RESTARTS), *server]) as agent:
        if rank:
            code = agent.wait()
        else:
            code = run_cells(submission, task, cells, "torchrun", "--rendezvous", launcher)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_LEAVE_GRACE_S)
    del meeting
    return code


@contextlib.contextmanager
def _child(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it when the block ends. It gets no PET_… variables: they are meant for this process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    child = subprocess.Popen(words, env=environment)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
