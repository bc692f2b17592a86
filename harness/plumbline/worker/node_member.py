"""A process of a node whose subject starts its ranks by itself: how it joins the recording, and how it ends.

The first process of a node calls the subject, and sets a variable with which the others join: forked ones after the
fork, spawned ones as they unpickle the job or its model, scripts as they call ``current_job``. Each connects to the
fork server's registry; the connection ends as the process does. At its end, before anything is shut down, it writes its
evidence as that of the rank which it was.
"""

from __future__ import annotations

import atexit
import copyreg
import json
import multiprocessing
import os
import re
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing import util
from threading import Lock
from typing import Any

from plumbline.evidence import rank_file as evidence
from plumbline.worker.arithmetic import compute_as_named
from plumbline.worker.assignment import Assignment
from plumbline.worker.child_registry import Address, connect
from plumbline.worker.job import Job
from plumbline.worker.processes import dump_stacks_on_request
from plumbline.worker.recording.child_recorder import ChildRecorder
from plumbline.worker.recording.late_evidence import answer_requests
from plumbline.worker.recording.process_groups import keep_process_groups

VARIABLE = "PLUMBLINE_ASSIGNMENT"
"""What a child must know, as JSON: the assignment of its node, its first process, and the registry's address."""

_FIRST_PRIORITY = 1000
"""The priority of a finalizer of multiprocessing's that runs before all others."""

_NUMBERED = re.compile(r"Process-(\d+)$")

_current: NodeMember | None = None


def current_member() -> NodeMember:
    """Return this process as a part of its node's recording, which it joins if it has not joined yet.

    Raises:
        RuntimeError: neither Plumbline has started it, nor a subject under test.
    """
    global _current
    if _current is None:
        if VARIABLE not in os.environ:
            raise RuntimeError("there is no current job: this process was not started by Plumbline")
        _current = NodeMember.of_child(json.loads(os.environ[VARIABLE]))
    _current.claim_rank()
    return _current


def lead(assignment: Assignment, address: Address) -> NodeMember:
    global _current
    os.environ[VARIABLE] = json.dumps({"assignment": assignment.to_json(), "address": address, "first": os.getpid()})
    _current = NodeMember(assignment, address, os.getpid())
    _current.watch_forks()
    return _current


def _recorder_of_this_process() -> ChildRecorder:
    return current_member().recorder


copyreg.pickle(ChildRecorder, lambda recorder: (_recorder_of_this_process, (), recorder.model))


class NodeMember:
    """One process of a node whose subject starts its ranks by itself."""

    def __init__(self, assignment: Assignment, address: Address, first: int) -> None:
        self.assignment = assignment
        self.recorder = ChildRecorder(assignment.tensor_store(), self.report, self.finish)
        self.job = Job(assignment, self.recorder)
        self.recorder.install()
        keep_process_groups(self.write_so_far)
        self._address = address
        self._first = first
        self._place: int | None = None
        self._direct = False
        self._line: socket.socket | None = None
        self._claimed = False
        self._done = False
        self._code = 0
        self._answers = False
        self._lock = Lock()

    @classmethod
    def of_child(cls, values: dict[str, Any]) -> NodeMember:
        """Join as a process that shares no memory with the one that started it."""
        assignment = Assignment.from_json(values["assignment"])
        if "RANK" in os.environ:
            assignment = assignment.as_rank(int(os.environ["RANK"]))
        if assignment.cell.accelerator == "cuda":
            compute_as_named()
        member = cls(assignment, values["address"], values["first"])
        atexit.register(member._end)
        member.watch_forks()
        member._join()
        return member

    def watch_forks(self) -> None:
        os.register_at_fork(after_in_child=self._forked)
        util.register_after_fork(self, NodeMember._join)
        atexit.register(self.finish)

    def claim_rank(self) -> None:
        """Note that this process asked for the job: it is a rank, whatever it does with it."""
        if not self._claimed and os.getpid() != self._first:
            self._claimed = True
            self.report()

    def report(self, **values: Any) -> None:
        """Report values about this process to the server, after its identity."""
        if "steps" in values and not self._answers:
            self._answers = True
            answer_requests(self.write_so_far)
        if os.getpid() == self._first:
            return
        # Without a server the values are of no use.
        with suppress(OSError):
            if self._line is None:
                self._line = connect(self._address)
                dump_stacks_on_request(os.open(self._stack, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
                values = {**self._introduction(), **values}
            self._line.sendall(json.dumps(values).encode() + b"\n")

    def finish(self) -> None:
        if self._done or os.getpid() == self._first:
            return
        with self._lock:
            self._done = True
        if self._direct and os.getppid() != self._first:
            return  # it ends because its parent is gone, not because training has ended
        raised, self._code = _raised()
        if raised is not None and self._line is not None:
            with open(self.assignment.as_rank(self.rank).log, "a", encoding="utf-8") as log:
                traceback.print_exception(raised, file=log)
        if self._claimed or self.recorder.is_active or (raised is not None and self._line is not None):
            self.write_evidence(raised)
        elif self._line is not None:
            self.report(idle=True)
        if self._line is not None:
            with suppress(OSError):
                os.unlink(self._stack)

    def write_so_far(self) -> None:
        """Write what was recorded so far: it counts where this process is ended before it writes the whole."""
        with self._lock:
            if self.recorder.steps and not self._done:
                with suppress(OSError):  # the whole comes later, and names the obstacle
                    evidence.write_rank(
                        evidence.so_far_path(self.assignment.as_rank(self.rank).evidence),
                        self.recorder.trace(self.rank),
                    )

    def write_evidence(self, raised: BaseException | None) -> None:
        rank = self.rank
        own = self.assignment.as_rank(rank).evidence
        private = f"{own}.{os.getpid()}"
        try:
            evidence.write_rank(private, self.recorder.trace(rank, raised))
        except OSError as broken:
            self.report(unwritten=str(broken)[:300])
            raise
        try:
            os.link(private, own)
        except FileExistsError:
            message = (
                f"two processes of this launch were rank {rank}: does each node start its own ranks, and no others?"
            )
            raised = raised or RuntimeError(message)
            evidence.write_rank(own, self.recorder.trace(rank, raised))
        os.unlink(private)
        with suppress(FileNotFoundError):
            os.unlink(evidence.so_far_path(own))
        self.report(evidence=rank, failed=raised is not None)

    @property
    def _stack(self) -> str:
        return os.path.join(os.path.dirname(self.assignment.log), f"pid-{os.getpid()}.stack")

    @property
    def rank(self) -> int:
        """The rank that this process was: by its process group, else by RANK, else by its number among its siblings."""
        if self.recorder.rank is not None:
            return self.recorder.rank
        if os.environ.get("RANK", "").isdecimal():
            return int(os.environ["RANK"])
        return self.assignment.rank + (self._place or 0)

    def _introduction(self) -> dict[str, Any]:
        return {"below": self._first, "pid": os.getpid(), "rank": self.rank if "RANK" in os.environ else None}

    def _forked(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._place, self._lock = None, None, Lock()
        self._claimed = self._direct = self._done = self._answers = False
        self.recorder.reset()

    def _end(self) -> None:
        """End a spawned process without running destructors: see :func:`plumbline.worker.rank.run`.

        This runs last at its exit. The exit code of a script is not known here.
        """
        if multiprocessing.parent_process() is not None and self._done:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)

    def _join(self) -> None:
        """Join, as a process of multiprocessing's, which runs no atexit function when it ends, or as a script."""
        util.Finalize(None, self.finish, exitpriority=_FIRST_PRIORITY)
        process = multiprocessing.current_process()
        self._direct = os.getppid() == self._first
        # A spawned process that is still unpickling its target has its number in its name alone.
        number = process._identity[-1:] or _NUMBERED.findall(process.name)
        if self._direct and number and not process.daemon:
            # Most probably a rank, and most probably this one: processes are numbered as they are started.
            self._place = min(int(number[0]), self.assignment.processes_per_node) - 1
            self.report(rank=self.rank)


def _raised() -> tuple[BaseException | None, int]:
    """Return the exception that ends this process, None if there is none, and the exit code that follows from it.

    It is propagating through multiprocessing now, or has propagated through a script.
    """
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if not isinstance(raised, SystemExit):
        return raised, int(raised is not None)
    if not raised.code:
        return None, 0
    # With a code, it is how torch.multiprocessing's processes end when something else was raised.
    return raised.__context__ or raised, raised.code if isinstance(raised.code, int) else 1
