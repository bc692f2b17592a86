"""A process of a node whose subject starts its ranks itself: it joins the launch, and writes its evidence.

The first process of a node calls the subject, and sets an environment variable through which the others join: forked
processes after the fork, spawned ones when they unpickle the job or its model, scripts when they call ``current_job``.
Each keeps a connection to the fork server's registry until its end. It writes the evidence of its rank before anything
is shut down.
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
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

from torch import nn

from plumbline.devices.calls import compute_as_named
from plumbline.evidence import trace_file as evidence
from plumbline.evidence.tensor_store import TensorStore
from plumbline.recording.process import follow_processes, rank_and_world
from plumbline.worker.assignment import Assignment
from plumbline.worker.child_registry import Address, connect
from plumbline.worker.job import Job
from plumbline.worker.processes import dump_stacks_on_request
from plumbline.worker.recorder.late_evidence import answer_requests, keep_process_groups
from plumbline.worker.recorder.recorder import Recorder

VARIABLE = "PLUMBLINE_ASSIGNMENT"
"""The environment variable for children, as JSON: the node's assignment, its first process, and the registry's
address."""

_NUMBERED = re.compile(r"Process-(\d+)$")

_current: NodeMember | None = None


def current_member() -> NodeMember:
    """Return the member for this process; join the launch if this process has not joined yet."""
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


class ChildRecorder(Recorder):
    """A recorder that learns its rank from the process group, and that can be pickled and sent to a child.

    A pickled model includes its hooks. Once unpickled, they belong to the recorder of the new process.
    """

    def __init__(self, store: TensorStore, report: Callable[..., None], finish: Callable[[], None]) -> None:
        super().__init__(store, lambda steps: report(steps=steps))
        self.rank: int | None = None
        self._report = report
        self._finish = finish

    @property
    def model(self) -> nn.Module | None:
        """The model that is recorded, and that carries the recorder's hooks."""
        return self._tensors.model

    def __setstate__(self, model: nn.Module) -> None:
        # The model has no parameters yet: it is still being unpickled, and its hook refers to this recorder.
        self._tensors.model = model
        self._watched = [model]

    @property
    def is_active(self) -> bool:
        """Whether anything was recorded that only ranks do."""
        return bool(self.steps or self.evaluations or self.rank is not None)

    def reset(self) -> None:
        """Forget all but the models: what was recorded so far belongs to the parent process."""
        model, watched = self._tensors.model, self._watched
        self.__init__(self._store, self._report, self._finish)  # type: ignore[misc]
        self._tensors.model, self._watched = model, watched

    def on_finished(self) -> None:
        """Write the evidence now: this process may be killed."""
        self._finish()

    def _note_world(self) -> None:
        super()._note_world()
        place = rank_and_world()
        if place is not None and place[0] != self.rank:
            self.rank = place[0]
            self._report(rank=self.rank)


def _recorder_of_this_process() -> ChildRecorder:
    return current_member().recorder


copyreg.pickle(ChildRecorder, lambda recorder: (_recorder_of_this_process, (), recorder.model))


class NodeMember:
    """One process of a node whose subject starts its ranks itself."""

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
        """Join the launch in a process that was not forked from the one that started it."""
        assignment = Assignment.from_json(values["assignment"])
        if "RANK" in os.environ:
            assignment = assignment.as_rank(int(os.environ["RANK"]))
        if assignment.cell.accelerator != "cpu":
            compute_as_named()
        member = cls(assignment, values["address"], values["first"])
        atexit.register(member._end)
        member.watch_forks()
        member._join()
        return member

    def watch_forks(self) -> None:
        follow_processes(self.finish, self._forked, self._join)

    def claim_rank(self) -> None:
        """Note that this process asked for the job, and so is a rank."""
        if not self._claimed and os.getpid() != self._first:
            self._claimed = True
            self.report()

    def report(self, **values: Any) -> None:
        """Report values about this process to the server; the first report includes its identity."""
        if "steps" in values and not self._answers:
            self._answers = True
            answer_requests(self.write_so_far)
        if os.getpid() == self._first:
            return
        # Without a server, the values are not needed.
        with suppress(OSError):
            if self._line is None:
                self._line = connect(self._address)
                dump_stacks_on_request(os.open(self._stack, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
                rank = self.rank if "RANK" in os.environ else None
                values = {"below": self._first, "pid": os.getpid(), "rank": rank, **values}
            self._line.sendall(json.dumps(values).encode() + b"\n")

    def finish(self) -> None:
        if self._done or os.getpid() == self._first:
            return
        with self._lock:
            self._done = True
        if self._direct and os.getppid() != self._first:
            return  # it ends because its parent is gone, not because the training has ended
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
        """Write the evidence so far, in case this process is killed before it writes all of it."""
        with self._lock:
            if self.recorder.steps and not self._done:
                with suppress(OSError):  # writing all of it later will fail, too, and report why
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
                f"two processes of this launch were rank {rank}: each node must start its own ranks, and no others"
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
        """The rank of this process: from its process group, else from RANK, else from its number among its siblings."""
        if self.recorder.rank is not None:
            return self.recorder.rank
        if os.environ.get("RANK", "").isdecimal():
            return int(os.environ["RANK"])
        return self.assignment.rank + (self._place or 0)

    def _forked(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._place, self._lock = None, None, Lock()
        self._claimed = self._direct = self._done = self._answers = False
        self.recorder.reset()

    def _end(self) -> None:
        """End a spawned process without running destructors: see :func:`plumbline.worker.rank.run`.

        This runs last at its exit. It does not know the exit code of a script.
        """
        if multiprocessing.parent_process() is not None and self._done:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)

    def _join(self) -> None:
        process = multiprocessing.current_process()
        self._direct = os.getppid() == self._first
        # While a spawned process unpickles its target, only its name contains its number.
        number = process._identity[-1:] or _NUMBERED.findall(process.name)
        if self._direct and number and not process.daemon:
            # Most probably the rank with this number: processes are numbered in the order in which they start.
            self._place = min(int(number[0]), self.assignment.processes_per_node) - 1
            self.report(rank=self.rank)


def _raised() -> tuple[BaseException | None, int]:
    """Return the exception that ends this process, if any, and the resulting exit code.

    The exception is propagating through multiprocessing, or has propagated through a script.
    """
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if not isinstance(raised, SystemExit):
        return raised, int(raised is not None)
    if not raised.code:
        return None, 0
    # A process of torch.multiprocessing exits with a code while it handles the original exception.
    return raised.__context__ or raised, raised.code if isinstance(raised.code, int) else 1
