"""Runs a function on several ranks: forks their supervisor and waits for their ends."""

from __future__ import annotations

import gc
import math
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from plumbline.core.errors import LaunchError
from plumbline.launch.stacks import PendingCall, calls_of
from plumbline.launch.this_machine import why_too_many
from plumbline.ranks.rank_main import (
    WITH_TERMINAL,
    Debugging,
    Describe,
    Function,
    How,
    RankEnd,
    RankReport,
    Streams,
    Terminal,
    World,
    run,
)
from plumbline.worker.processes import adopt, die_with, end_all, signal_session, wakeup_pipe
from plumbline.worker.rank_log import Log


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def run_on_ranks(
    function: Callable[[Terminal], Any],
    ranks: int,
    *,
    timeout: float,
    backend: str | None = None,
    init: bool = True,
    capture: bool = True,
    describe: Callable[[BaseException], Any] = _traceback,
) -> tuple[RankEnd, ...]:
    """Call ``function`` on ``ranks`` processes that are forked from this one, and return how each ended, by rank.

    Each rank has torchrun's environment variables, the default process group, and one thread. The function may be a
    closure over anything in this process's memory; its return value is pickled. When one rank fails, the others have a
    second to end. No process that ranks start outlives this call.

    Args:
        function: Is called with a :class:`~plumbline.ranks.rank_main.Terminal`, which has the ``rank``.
        ranks: The number of ranks, at least 1.
        timeout: Seconds after which ranks are killed.
        backend: The backend of the default process group; None is that of the devices, such as nccl, if there is one
            for each rank, else gloo.
        init: Whether to initialise the default process group; without it, the function can do so.
        capture: Whether to keep what ranks print. Otherwise they print where this process prints.
        describe: Is called on a rank with the exception that ``function`` raised; its result is the ``description``.
            If it raises, the description is the traceback.

    Raises:
        LaunchError: The ranks cannot be started; the message says what to do.
    """
    if why := why_too_many(ranks):
        raise LaunchError(why)
    import torch._dynamo
    import torch.distributed  # the first DistributedDataParallel(...) imports it, which takes a second

    if init and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise LaunchError(
            "this process is in a process group already, so ranks that are forked from it cannot form another: call "
            "torch.distributed.destroy_process_group() first"
        )
    world = World.prepare(ranks, backend, init)
    order = Order(function, describe, timeout, capture)
    here, there = Pipe()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):  # otherwise each rank would print what is buffered now
            stream.flush()  # type: ignore[union-attr]
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 and newer warn if this process has threads. A rank computes in the thread that remains.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            raise LaunchError(
                f"cannot start a process for the ranks: {error.strerror}; check ulimit -u and the free memory"
            ) from error
    if not pid:
        here.close()
        supervise(world, order, there, parent)
    there.close()
    world.listener.close()
    ends: Any = None
    try:
        with suppress(EOFError, OSError):
            ends = here.recv()
    finally:
        here.close()  # a supervisor that still runs then ends its ranks and itself
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if not isinstance(ends, list):
        raise LaunchError(f"the supervisor of the ranks has ended: {ends or 'it was killed'}")
    return tuple(_opened(*end) for end in ends)


def _opened(end: RankEnd, report: RankReport | None) -> RankEnd:
    if report is None:
        return end
    outcome, description = pickle.loads(report.outcome), pickle.loads(report.description)
    return replace(end, description=description, **{"error" if report.raised else "value": outcome})


class _Output:
    """The output of a rank on one stream, in an unnamed file, which does not have to be removed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.log = Log(f"/dev/fd/{self._file.fileno()}")

    def text(self) -> str:
        self.log.close()
        self._file.seek(0)
        with self._file:
            return self._file.read().decode(errors="replace")


class RankProcess:
    """One rank of a launch, from before its fork until its end is known."""

    def __init__(self, rank: int, capture: bool) -> None:
        self.rank = rank
        self.pid = 0
        self.report: RankReport | None = None
        self.code: int | None = None
        self.how: How | None = None
        self.calls: tuple[PendingCall, ...] = ()
        self.at = 0.0
        self.is_debugging = False
        self.connection, self.rank_connection = Pipe()
        self.outputs = [_Output(), _Output()] if capture else []
        self._stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def streams(self) -> Streams:
        out, err = (output.log.sink for output in self.outputs) if self.outputs else (None, None)
        return Streams(out, err, self._stack.fileno())

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor has not waited for its end yet."""
        return self.code is None

    @property
    def has_failed(self) -> bool:
        return self.how in (How.RAISED, How.DIED)

    def forked(self, pid: int) -> None:
        """In the supervisor, note the process id, and close the rank's ends."""
        self.pid = pid
        self.rank_connection.close()
        for output in self.outputs:
            os.close(output.log.sink)

    def close_in_fork(self) -> None:
        """In a rank, close the supervisor's ends."""
        self.connection.close()
        for output in self.outputs:
            output.log.close_in_fork()

    def note_end(self, how: How) -> None:
        """Note how it ended, unless that is known already."""
        if self.how is None:
            self.how, self.at = how, time.monotonic()
            if how is not How.RETURNED:
                self.calls = calls_of(os.pread(self._stack.fileno(), 1 << 18, 0).decode(errors="replace"))

    def request_stack(self) -> None:
        """Make it write its stacks. A stopped process has to continue for that."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def has_stack(self) -> bool:
        return os.fstat(self._stack.fileno()).st_size > 0

    def kill(self) -> None:
        """Kill it, and the processes that it left in its session."""
        signal_session(self.pid, signal.SIGKILL)

    def texts(self) -> tuple[str, str]:
        """Return what it printed to stdout and stderr. Call this once, after its end."""
        self._stack.close()
        if not self.outputs:
            return "", ""
        out, err = (output.text() for output in self.outputs)
        return out, err


GRACE_S = 1.0
"""Time for the other ranks to end after one has failed: those that fail too show their own tracebacks."""

_STACK_S = 1.0
_EXIT_S = 5.0


@dataclass(frozen=True)
class Order:
    """The function to run, with a timeout in seconds. With ``capture``, the output of each rank is kept separately."""

    function: Function
    describe: Describe
    timeout: float
    capture: bool


SealedEnd = tuple[RankEnd, "RankReport | None"]
"""How a rank ended, and its report, whose pickles the supervisor does not open."""


class CallerGone(Exception):  # noqa: N818
    """The caller was interrupted or has died."""


class Supervisor:
    """Runs one launch, from the first fork to the last end."""

    def __init__(self, world: World, order: Order, caller: Connection) -> None:
        self._world, self._order, self._caller = world, order, caller
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._begun = time.monotonic()
        self._deadline = self._begun + order.timeout
        self._callers_group = os.getpgid(os.getppid())
        self._last_how = How.HUNG
        """How ranks end that are still running at the deadline."""

    def run(self) -> list[SealedEnd]:
        wake = wakeup_pipe()
        try:
            for rank in range(self._world.size):
                self._fork(rank)
            store = self._world.serve()
            self._selector.register(wake, selectors.EVENT_READ)
            self._selector.register(self._caller, selectors.EVENT_READ, self._caller)
            while self._not_ended:
                if not self._follow(self._deadline):
                    self._end_late()
            self._let_exit()
            del store
        finally:
            for process in self._alive:
                process.kill()
            end_all()
        return [self._end_of(process) for process in self._ranks]

    @property
    def _alive(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.is_alive and process.pid]

    @property
    def _not_ended(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.how is None]

    def _fork(self, rank: int) -> None:
        parent, process = os.getpid(), RankProcess(rank, self._order.capture)
        self._ranks.append(process)
        pid = os.fork()
        if pid:
            process.forked(pid)
            self._selector.register(process.connection, selectors.EVENT_READ, process)
            for output in process.outputs:
                self._selector.register(output.log.source, selectors.EVENT_READ, output.log)
            return
        try:
            self._caller.close()
            for other in self._ranks:
                other.close_in_fork()
            order = self._order
            if rank == WITH_TERMINAL:
                with suppress(OSError):  # the caller's group is gone
                    os.setpgid(0, self._callers_group)
            run(rank, self._world, order.function, order.describe, process.rank_connection, process.streams, parent)
        finally:
            os._exit(70)

    def _follow(self, deadline: float) -> bool:
        """Handle what happens next; return False when the deadline has passed."""
        left = deadline - time.monotonic()
        ready = self._selector.select(None if math.isinf(left) else max(left, 0.0))
        self._reap()  # first: a rank dies before others notice and report that
        for key, _ in ready:
            if isinstance(key.data, RankProcess):
                self._receive(key.data)
            elif key.data is self._caller:
                raise CallerGone
            elif key.data is None:
                if signal.SIGTERM in os.read(key.fd, 1 << 12):
                    raise CallerGone
            elif not key.data.read():
                self._selector.unregister(key.fileobj)
        return bool(ready) or left > 0

    def _receive(self, process: RankProcess) -> None:
        try:
            while process.connection.poll():
                self._take(process, process.connection.recv())
        except (EOFError, OSError):  # it has closed its end
            with suppress(KeyError):
                self._selector.unregister(process.connection)

    def _take(self, process: RankProcess, message: Debugging | RankReport) -> None:
        if isinstance(message, Debugging):
            process.is_debugging = message.active
        elif process.how is None:
            process.report, process.is_debugging = message, False
            process.note_end(How.RAISED if message.raised else How.RETURNED)
        self._move_deadline()

    def _move_deadline(self) -> None:
        """Set the deadline: none while a debugger is active, a short one after a failure."""
        now = time.monotonic()
        if any(one.is_debugging for one in self._ranks):
            self._deadline = math.inf
            return
        if math.isinf(self._deadline):
            self._deadline = now + self._order.timeout
        if any(one.has_failed for one in self._ranks):
            self._last_how = How.ENDED
            self._deadline = min(self._deadline, now + GRACE_S)

    def _reap(self) -> None:
        for process in self._alive:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                process.code = os.waitstatus_to_exitcode(status)
                process.kill()  # the processes that it left in its session
                if process.how is None:
                    self._receive(process)  # what it had sent before
                    process.note_end(How.DIED)
                    process.is_debugging = False
                    self._move_deadline()

    def _end_late(self) -> None:
        late = self._not_ended
        for process in late:
            process.request_stack()
        deadline = time.monotonic() + _STACK_S
        while not all(process.has_stack for process in late) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in late:
            process.note_end(self._last_how)

    def _let_exit(self) -> None:
        for process in self._ranks:
            if process.how in (How.HUNG, How.ENDED):
                process.kill()
            with suppress(KeyError):
                self._selector.unregister(process.connection)
            process.connection.close()
        deadline = time.monotonic() + _EXIT_S
        while self._alive and self._follow(deadline):
            pass

    def _end_of(self, process: RankProcess) -> SealedEnd:
        stdout, stderr = process.texts()
        end = RankEnd(
            rank=process.rank,
            how=process.how or How.ENDED,
            seconds=process.at - self._begun,
            code=process.code if process.how is How.DIED else None,
            calls=process.calls,
            stdout=stdout,
            stderr=stderr,
        )
        return end, process.report


def supervise(world: World, order: Order, caller: Connection, parent: int) -> NoReturn:
    """Supervise one launch, and send the ends of its ranks to the caller. Does not return: the process ends here."""
    try:
        die_with(parent, signal.SIGTERM)
        os.setpgid(0, 0)  # a signal to the caller's group must not end the process that cleans up
        adopt()
        gc.freeze()  # garbage collection would copy the pages of the caller's objects
        caller.send(Supervisor(world, order, caller).run())
    except CallerGone:
        pass
    except BaseException:
        with suppress(OSError):
            caller.send(traceback.format_exc())
    finally:
        os._exit(0)
