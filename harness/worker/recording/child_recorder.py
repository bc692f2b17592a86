"""Processes that a subject starts by itself: how each of them joins the recording, and what it leaves when it ends.

The first process of a node calls the subject, and sets a variable by which the others know what they are part of. They
join where they are forked, where they unpickle the job or a model of the job's (spawned ones), or where they ask for
the job (scripts). Each says so to the fork server, on a line that ends when it ends. As it ends, before anything is
shut down, it leaves its evidence as that of the rank which it was.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import util
from threading import Lock
from typing import Any

import torch
import torch.distributed
from torch import nn

from harness.evidence import rank_file as evidence
from harness.evidence.trace import RankTrace
from harness.worker.arithmetic import compute_as_named
from harness.worker.assignment import Assignment
from harness.worker.child_registry import Address, connect
from harness.worker.exception_text import calls_in, in_words
from harness.worker.job import Job
from harness.worker.recording.late_evidence import answer_question
from harness.worker.recording.process_groups import keep_process_groups
from harness.worker.recording.recorder import Recorder

VARIABLE = "PLUMBLINE_ASSIGNMENT"
"""What a child must know, as JSON: the assignment of its node, and how to reach its first process and the server."""

_AT_ONCE = 1000
"""Priority of what multiprocessing does where a child ends: before everything that has one."""

_NUMBERED = re.compile(r"Process-(\d+)$")

_member: Member | None = None


def member() -> Member:
    """Return this process as a part of its node's recording, which it joins if it has not yet.

    Raises:
        RuntimeError: neither Plumbline has started it, nor a subject under test.
    """
    global _member
    if _member is None:
        if VARIABLE not in os.environ:
            raise RuntimeError("there is no current job: this process was not started by Plumbline")
        _member = Member.of_child(json.loads(os.environ[VARIABLE]))
    _member.ask()
    return _member


def lead(assignment: Assignment, address: Address) -> Member:
    """Return this process as the first of its node, after which every other one comes."""
    global _member
    os.environ[VARIABLE] = json.dumps({"assignment": assignment.to_json(), "address": address, "first": os.getpid()})
    _member = Member(assignment, address, os.getpid())
    _member.watch_forks()
    return _member


class ChildRecorder(Recorder):
    """A recorder that knows which rank it is on once there is a process group, and finds its way into a child.

    A pickled model brings its hooks along: where they are unpickled, they are those of that process's own recorder.
    """

    def __init__(self, sketch_above: int, tell: Callable[..., None]) -> None:
        super().__init__(sketch_above, _Counter(tell))
        self.rank: int | None = None
        self._tell = tell

    def __reduce__(self) -> Any:
        return _recorder_of_this_process, (), self._model

    def __setstate__(self, model: nn.Module) -> None:
        # It has no parameters yet: it is being unpickled itself, and holds the hook that brought us here.
        self._model = model

    @property
    def is_active(self) -> bool:
        """Whether anything was seen that only a rank does."""
        return bool(self.steps or self.evaluations or self.rank is not None)

    def begin_anew(self) -> None:
        """Forget all but the model: what was recorded so far belongs to the process that this one was forked from."""
        model = self._model
        self.__init__(self._sketch_above, self._tell)  # type: ignore[misc]
        self._model = model

    def _note_world(self) -> None:
        super()._note_world()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
            if rank != self.rank:
                self.rank = rank
                self._tell(rank=rank)


def _recorder_of_this_process() -> ChildRecorder:
    return member().recorder


class _Counter:
    """What a recorder keeps its number of steps in: every new one is told."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __setitem__(self, place: slice, number: bytes) -> None:
        self._tell(steps=int.from_bytes(number, "little"))


class Member:
    """One process of a node whose subject starts its ranks by itself."""

    def __init__(self, assignment: Assignment, address: Address, first: int) -> None:
        self.assignment = assignment
        self.recorder = ChildRecorder(assignment.sketch_above, self.tell)
        self.job = Job(assignment, self.recorder)
        self.recorder.install()
        keep_process_groups(self.leave_so_far)
        self._address = address
        self._first = first
        self._place: int | None = None
        self._direct = False
        self._line: socket.socket | None = None
        self._asked = False
        self._done = False
        self._code = 0
        self._answers = False
        self._lock = Lock()

    @classmethod
    def of_child(cls, values: dict[str, Any]) -> Member:
        """Join as a process that shares no memory with the one that started it."""
        assignment = Assignment.from_json(values["assignment"])
        if "RANK" in os.environ:
            assignment = assignment.as_rank(int(os.environ["RANK"]))
        if assignment.cell.accelerator == "cuda":
            compute_as_named()
        member = cls(assignment, values["address"], values["first"])
        atexit.register(member._end)
        member.watch_forks()
        member._begin()
        return member

    def watch_forks(self) -> None:
        """See to it that what this process forks, whoever does it, is a process of its own."""
        os.register_at_fork(after_in_child=self._forked)
        util.register_after_fork(self, Member._begin)
        atexit.register(self.leave)

    def ask(self) -> None:
        """Take note that this process wants the job, or has it in its own right: it is a rank, whatever it does."""
        if not self._asked and os.getpid() != self._first:
            self._asked = True
            self.tell()

    def tell(self, **values: Any) -> None:
        """Tell the server something about this process; what it is told first is who this is."""
        if "steps" in values and not self._answers:
            self._answers = True
            answer_question(self.leave_so_far)
        if os.getpid() == self._first:
            return
        # Without a server there is nobody left to whom it matters.
        with suppress(OSError):
            if self._line is None:
                self._line = connect(self._address)
                self._say_where_it_is_when_asked()
                values = {**self._introduction(), **values}
            self._line.sendall(json.dumps(values).encode() + b"\n")

    def leave(self) -> None:
        """Leave evidence, if this process was a rank: once, whichever of its ends comes first."""
        if self._done or os.getpid() == self._first:
            return
        with self._lock:
            self._done = True
        if self._direct and os.getppid() != self._first:
            return  # it was told to end because the one that started it is gone: this is no end of a training
        raised, self._code = _raised()
        if raised is not None and self._line is not None:
            with open(self.assignment.as_rank(self.rank).log, "a", encoding="utf-8") as log:
                traceback.print_exception(raised, file=log)
        if self._asked or self.recorder.is_active or (raised is not None and self._line is not None):
            self.leave_evidence(raised)
        elif self._line is not None:
            self.tell(idle=True)
        if self._line is not None:
            with suppress(OSError):
                os.unlink(self._stack)

    def leave_so_far(self) -> None:
        """Write what was recorded so far: it counts where this process has to be ended before it leaves the whole."""
        with self._lock:
            if self.recorder.steps and not self._done:
                with suppress(OSError):  # the whole comes later, and says what is in the way
                    evidence.write_rank(
                        evidence.so_far_path(self.assignment.as_rank(self.rank).evidence), self.trace(self.rank, None)
                    )

    def leave_evidence(self, raised: BaseException | None) -> None:
        """Write what was recorded, and what was raised, as this rank's; it is there as a whole or not at all."""
        rank = self.rank
        own = self.assignment.as_rank(rank).evidence
        private = f"{own}.{os.getpid()}"
        try:
            evidence.write_rank(private, self.trace(rank, raised))
        except OSError as broken:
            self.tell(unwritten=str(broken)[:300])
            raise
        try:
            os.link(private, own)
        except FileExistsError:
            said = f"two processes of this launch were rank {rank}: does each node start its own ranks, and no others?"
            raised = raised or RuntimeError(said)
            evidence.write_rank(own, self.trace(rank, raised))
        os.unlink(private)
        with suppress(FileNotFoundError):
            os.unlink(evidence.so_far_path(own))
        self.tell(evidence=rank, failed=raised is not None)

    def trace(self, rank: int, raised: BaseException | None) -> RankTrace:
        """Return what was recorded, and what was raised."""
        if raised is None:
            return self.recorder.trace(rank, None, None)
        return replace(self.recorder.trace(rank, in_words(raised), time.time()), stack=calls_in(raised))

    @property
    def _stack(self) -> str:
        """The file for the stacks of this process; whose rank it is, is not known yet."""
        return os.path.join(os.path.dirname(self.assignment.log), f"pid-{os.getpid()}.stack")

    @property
    def rank(self) -> int:
        """The rank that this process was: its group's word counts, then its launcher's, then its place among others."""
        if self.recorder.rank is not None:
            return self.recorder.rank
        if os.environ.get("RANK", "").isdecimal():
            return int(os.environ["RANK"])
        return self.assignment.rank + (self._place or 0)

    def _introduction(self) -> dict[str, Any]:
        return {"below": self._first, "pid": os.getpid(), "rank": self.rank if "RANK" in os.environ else None}

    def _say_where_it_is_when_asked(self) -> None:
        stack = os.open(self._stack, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        faulthandler.enable(file=stack)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    def _forked(self) -> None:
        """Begin anew where this process was forked; it shares nothing with the one that it was forked from."""
        if self._line is not None:
            self._line.close()
        self._line, self._place, self._lock = None, None, Lock()
        self._asked = self._direct = self._done = self._answers = False
        self.recorder.begin_anew()

    def _end(self) -> None:
        """End a spawned process without running destructors: see :func:`harness.worker.rank.run`.

        It is the last of what runs at its exit. Of a script nobody knows here with which code it ends.
        """
        if multiprocessing.parent_process() is not None and self._done:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)

    def _begin(self) -> None:
        """Join: a process of multiprocessing's, which runs nothing of atexit's when it ends, or a script."""
        util.Finalize(None, self.leave, exitpriority=_AT_ONCE)
        process = multiprocessing.current_process()
        self._direct = os.getppid() == self._first
        # A spawned process that is still unpickling what it is to run has its number in its name alone.
        number = process._identity[-1:] or _NUMBERED.findall(process.name)
        if self._direct and number and not process.daemon:
            # Most probably a rank, and then most probably this one: they are numbered as they are started.
            self._place = min(int(number[0]), self.assignment.processes_per_node) - 1
            self.tell(rank=self.rank)


def _raised() -> tuple[BaseException | None, int]:
    """Return what ends this process, None if nothing does, and the exit code that this means.

    It is passing through multiprocessing at this moment, or has passed through a script.
    """
    raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if not isinstance(raised, SystemExit):
        return raised, int(raised is not None)
    if not raised.code:
        return None, 0
    # With a code, it is how torch.multiprocessing's processes end when something else was raised.
    return raised.__context__ or raised, raised.code if isinstance(raised.code, int) else 1
