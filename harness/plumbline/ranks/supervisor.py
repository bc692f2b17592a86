"""The process between a caller and its ranks: forks them, follows them to their ends, and leaves nothing behind.

It is a process of its own so that the caller's children, signals and threads are not touched, and so that whatever
ranks start and lose can be found and ended: on Linux such processes become its children.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import selectors
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from plumbline.launch.stacks import PendingCall
from plumbline.ranks.channel import Channel
from plumbline.ranks.rank import WITH_TERMINAL, Debugging, Describe, Function, run
from plumbline.ranks.rank_end import How
from plumbline.ranks.rank_process import RankProcess
from plumbline.ranks.world import World
from plumbline.worker.processes import adopt, die_with, end_all

GRACE_S = 1.0
"""Time for the other ranks to end when one has failed: those that fail too are worth a traceback of their own."""

_STACK_S = 1.0
_EXIT_S = 5.0


@dataclass(frozen=True)
class Order:
    """What is to be run, and for how long, in seconds. With ``capture`` each rank's output is kept apart."""

    function: Function
    describe: Describe
    timeout: float
    capture: bool


@dataclass(frozen=True)
class PickledEnd:
    """A rank's end as the supervisor knows it, with what the rank has pickled unopened."""

    rank: int
    how: How
    seconds: float
    outcome: bytes | None
    description: bytes | None
    code: int | None
    calls: tuple[PendingCall, ...]
    stdout: str
    stderr: str


class CallerGone(Exception):  # noqa: N818
    """The caller was interrupted, or has died."""


class Supervisor:
    """Runs one launch, from the first fork to the last end."""

    def __init__(self, world: World, order: Order, caller: Channel) -> None:
        self._world, self._order, self._caller = world, order, caller
        self._selector = selectors.DefaultSelector()
        self._ranks: list[RankProcess] = []
        self._begun = time.monotonic()
        self._deadline = self._begun + order.timeout
        self._caller_is_gone = False
        self._callers_group = os.getpgid(os.getppid())
        self._last_how = How.HUNG
        """How those ended that are there when the deadline is over."""

    def run(self) -> list[PickledEnd]:
        """Run the launch.

        Raises:
            CallerGone: the caller does not wait for it any more; everything has been ended.
        """
        wake = self._listen_for_signals()
        try:
            for rank in range(self._world.size):
                self._fork(rank)
            store = self._world.serve()
            self._selector.register(wake, selectors.EVENT_READ)
            self._selector.register(self._caller, selectors.EVENT_READ, self._caller)
            while self._unsettled:
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
    def _unsettled(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.how is None]

    def _listen_for_signals(self) -> int:
        wake, wake_write = os.pipe()
        for descriptor in (wake, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # It only wakes the loop: an exception could interrupt the clean-up that the caller's end has begun already.
        signal.signal(signal.SIGTERM, self._note_end_of_caller)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, which ends us in order
        return wake

    def _note_end_of_caller(self, *_: object) -> None:
        self._caller_is_gone = True

    def _fork(self, rank: int) -> None:
        parent, process = os.getpid(), RankProcess(rank, self._order.capture)
        self._ranks.append(process)
        pid = os.fork()
        if pid:
            process.forked(pid)
            self._selector.register(process.channel, selectors.EVENT_READ, process)
            for output in process.outputs:
                self._selector.register(output.log.source, selectors.EVENT_READ, output.log)
            return
        try:
            signal.set_wakeup_fd(-1)
            self._caller.close()
            for other in self._ranks:
                other.close_in_fork()
            order = self._order
            if rank == WITH_TERMINAL:
                with suppress(OSError):  # the caller's group is gone
                    os.setpgid(0, self._callers_group)
            run(rank, self._world, order.function, order.describe, process.rank_channel, process.streams, parent)
        finally:
            os._exit(70)

    def _follow(self, deadline: float) -> bool:
        """Take in what happens next; return False when the deadline is over."""
        left = deadline - time.monotonic()
        ready = self._selector.select(None if math.isinf(left) else max(left, 0.0))
        if self._caller_is_gone:
            raise CallerGone
        self._reap()  # first: a rank that dies does so before others notice, and are heard
        for key, _ in ready:
            if isinstance(key.data, RankProcess):
                self._hear(key.data)
            elif key.data is self._caller:
                raise CallerGone
            elif key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 1 << 12)
            elif not key.data.read():
                self._selector.unregister(key.fileobj)
        return bool(ready) or left > 0

    def _hear(self, process: RankProcess) -> None:
        """Take in what a rank has sent."""
        messages, is_open = process.channel.drain()
        if not is_open and process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        for message in messages:
            if isinstance(message, Debugging):
                process.is_debugging = message.active
            elif process.how is None:
                process.report, process.is_debugging = message, False
                process.settle(How.RAISED if message.raised else How.RETURNED)
            self._move_deadline()

    def _move_deadline(self) -> None:
        """Set the deadline anew after what a rank did: none while somebody debugs, a short one after a failure."""
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
                process.kill()  # processes that it left in its session end with it
                if process.how is None:
                    self._hear(process)  # what it had sent before
                    process.settle(How.DIED)
                    process.is_debugging = False
                    self._move_deadline()

    def _end_late(self) -> None:
        """End those that have not ended, and note where they were."""
        late = self._unsettled
        for process in late:
            process.request_stack()
        deadline = time.monotonic() + _STACK_S
        while not all(process.has_stack for process in late) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in late:
            process.settle(self._last_how)

    def _let_exit(self) -> None:
        """Let those exit that wait for it, and wait until they have."""
        for process in self._ranks:
            if process.how in (How.HUNG, How.ENDED):
                process.kill()
            with suppress(KeyError):
                self._selector.unregister(process.channel)
            process.channel.close()
        deadline = time.monotonic() + _EXIT_S
        while self._alive and self._follow(deadline):
            pass

    def _end_of(self, process: RankProcess) -> PickledEnd:
        report = process.report
        stdout, stderr = process.texts()
        return PickledEnd(
            rank=process.rank,
            how=process.how or How.ENDED,
            seconds=process.at - self._begun,
            outcome=report.outcome if report else None,
            description=report.description if report else None,
            code=process.code if process.how is How.DIED else None,
            calls=process.calls,
            stdout=stdout,
            stderr=stderr,
        )


def supervise(world: World, order: Order, caller: Channel, parent: int) -> NoReturn:
    """Be the supervisor of one launch, and send its ends to the caller. Does not return: the process ends here."""
    try:
        die_with(parent, signal.SIGTERM)
        os.setpgid(0, 0)  # what kills the caller's group is to leave somebody who cleans up
        adopt()
        gc.freeze()  # what was there before the fork is no garbage of these processes', nor copied to find that out
        caller.send(Supervisor(world, order, caller).run())
    except CallerGone:
        pass
    except BaseException:
        with suppress(OSError):
            caller.send(traceback.format_exc())
    finally:
        os._exit(0)


def opened(data: bytes | None) -> Any:
    """Return what a rank has pickled, None where it has sent nothing."""
    return None if data is None else pickle.loads(data)
