"""The fork server: imports torch and the subject once, then forks a rank for each assignment it is given.

It reads commands, one JSON line each, from its standard input, and answers with events on the descriptor that its
standard output was. Ranks write their own events there too: a line is shorter than PIPE_BUF, so lines stay whole.
When its input ends, because the parent closed it or died, or at SIGTERM, it ends every rank and itself. What ranks
start becomes its own when they end, and goes with the launch; what they print goes through it into their logs.

CUDA and threads must not be touched here: neither survives a fork.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.errors import PlumblineError
from harness.worker import processes
from harness.worker.child_registry import Child, Registry
from harness.worker.connectivity import ConnectivityProbe
from harness.worker.large_pages import gather_in_large_pages
from harness.worker.log import Log
from harness.worker.preload import preload
from harness.worker.processes import die_with, is_stopped, kills_for_memory, signal_session
from harness.worker.recording.late_evidence import QUESTION
from harness.worker.scratch import NODE, Scratch


class ParentDisconnected(Exception):  # noqa: N818
    """There is nobody any more to be told anything."""


@dataclass(frozen=True)
class RankProcess:
    """A rank of a launch. ``done`` is memory that it shares with the server: how many steps it has done.

    ``kills`` is how often the kernel had killed for want of memory when it was process. ``scratch`` is the folder for
    temporary files where the subject starts the ranks of the node below this one, None where it does not.
    """

    launch: int
    rank: int
    evidence: str
    log: Log
    done: mmap.mmap
    kills: int
    scratch: Scratch | None = None

    @property
    def steps(self) -> int:
        """How many steps the rank has done."""
        return int.from_bytes(self.done[:], "little")

    def tidy_up(self) -> None:
        """Remove the folder for temporary files, when those that could write to it are gone."""
        if self.scratch:
            self.scratch.leave(remove=True)


class Server:
    """Forks ranks on command and reports what becomes of them."""

    def __init__(self, locator: str, commands: int, events: int, describe: Callable[[], dict[str, Any]] = dict):
        """``describe`` returns what else the parent is to know of this place, when torch has been imported."""
        self._describe = describe
        self._ways = ConnectivityProbe()
        self._locator = locator
        self._commands = commands
        self._events = events
        self._pipe = os.fstat(events).st_ino
        self._ranks: dict[int, RankProcess] = {}  # by pid
        self._registry: Registry | None = None
        self._selector = selectors.DefaultSelector()
        self._spared: frozenset[int] = frozenset()
        self._subjects: list[Any] = []

    def serve(self) -> bool:
        """Announce the subjects, then follow commands until they end; return whether that was said before."""
        parent = os.getppid()
        processes.adopt()
        die_with(parent)  # while it imports it hears of nobody's end
        try:
            self._subjects = preload(self._locator)
        except PlumblineError as error:
            self._announce({"event": "refused", "message": str(error)})
            return True
        except Exception:
            self._announce({"event": "refused", "message": traceback.format_exc()[-3000:]})
            return True
        die_with(parent, number=0)
        self._spared = processes.present()  # a library may have begun something when it was imported
        declared = [found.declaration() for found in self._subjects]
        self._announce({"event": "ready", "subjects": declared, "pid": os.getpid(), **self._describe()})
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends us in order.
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(self._commands, selectors.EVENT_READ)
        gather_in_large_pages()  # half a second, in which the parent makes its plan
        try:
            return self._obey(wake)
        except ParentDisconnected:
            return False
        finally:
            for pid in self._ranks:
                signal_session(pid, signal.SIGKILL)
            processes.end_all(self._spared)
            for process in self._ranks.values():
                process.tidy_up()

    def _obey(self, wake: int) -> bool:
        """Follow commands until they end; return whether that was said before."""
        lines = self._lines()
        while True:
            chosen = [key for key, _ in self._selector.select()]
            ready = {key.fd for key in chosen}
            for key in chosen:
                if key.data is not None and not key.data.read():
                    self._selector.unregister(key.fd)
            if wake in ready:
                if signal.SIGTERM in os.read(wake, 4096):
                    return True
                self._reap()
            if self._commands in ready:
                for command in next(lines):
                    if command is None or command["command"] == "end":
                        return command is not None
                    self._follow(command)

    def _lines(self) -> Iterator[list[dict[str, Any] | None]]:
        rest = b""
        while True:
            try:
                chunk = os.read(self._commands, 1 << 20)
            except OSError as error:  # a network that was cut
                raise ParentDisconnected from error
            if not chunk:
                yield [None]
                continue
            *whole, rest = (rest + chunk).split(b"\n")
            yield [json.loads(line) for line in whole]

    def _follow(self, command: dict[str, Any]) -> None:
        if command["command"] == "launch":
            self._ways.close()
            for values in command["assignments"]:
                self._fork(command["subject"], values)
        elif command["command"] == "signal":
            for pid, process in self._ranks.items():
                if process.launch == command["launch"]:
                    self._tell(pid, process, command["signal"])
        else:
            self._announce(self._ways.answer(command))

    def _tell(self, pid: int, process: RankProcess, number: int) -> None:
        """Signal a rank; one that was stopped goes on, or it could not say where it is.

        Whoever is asked where it is, is also asked for the evidence that there is so far.
        """
        if number == signal.SIGKILL:
            # Those below first: some take the end of the first process for a reason to end well.
            self._end_below(pid)
            signal_session(pid, number)
            return
        below = [child.pid for child in self._registry.below(pid)] if self._registry else []
        stopped = is_stopped(pid)
        place = {"launch": process.launch, "rank": process.rank}
        self._announce({"event": "late", **place, "steps": process.steps, "stopped": stopped})
        question = () if QUESTION is None else (QUESTION,)
        for one in (*below, pid):
            for sent in (number, *question, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(one, sent)

    def _fork(self, subject: str, values: dict[str, Any]) -> None:
        server = os.getpid()
        Path(values["evidence"]).unlink(missing_ok=True)  # nobody's but this rank's may be found there
        log, done = Log(values["log"]), mmap.mmap(-1, 8)
        scratch = Scratch.new(NODE) if values["whole_node"] else None
        if scratch and self._registry is None:
            self._registry = Registry(self._hear)
            self._selector.register(self._registry, selectors.EVENT_READ, self._registry)
        pid = os.fork()
        if pid:
            os.close(log.sink)
            self._selector.register(log.source, selectors.EVENT_READ, log)
            self._ranks[pid] = RankProcess(
                values["launch"], values["rank"], values["evidence"], log, done, kills_for_memory(), scratch
            )
            return
        try:
            for descriptor in (1, 2):
                os.dup2(log.sink, descriptor)
            os.close(log.sink)
            for one in (log, *(other.log for other in self._ranks.values())):
                one.let_go()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._commands)
            address = self._registry.address if self._registry else ""
            if self._registry:
                self._registry.close()
            die_with(server)
            from harness.core.backend import declared_for
            from harness.worker import node_leader as first
            from harness.worker import rank
            from harness.worker.assignment import Assignment

            assignment = Assignment.from_json(values)
            declared = declared_for(subject, assignment.cell.backend, self._subjects)
            if scratch:
                first.run(assignment, declared, self._announce, address, scratch.path)
            else:
                rank.run(assignment, declared, self._announce, done)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in self._ranks:
                continue
            self._end_below(pid)
            # What the rank left in its session goes with it.
            signal_session(pid, signal.SIGKILL)
            process = self._ranks.pop(pid)
            event = {
                "event": "exit",
                "launch": process.launch,
                "rank": process.rank,
                "code": os.waitstatus_to_exitcode(status),
                "steps": process.steps,
                # A rank that has lost its descriptors cannot announce what it has written; one below writes there too.
                "evidence": process.scratch is None and os.path.exists(process.evidence),
                "out_of_memory": kills_for_memory() > process.kills,
                "at": time.monotonic(),
            }
            if not self._ranks:
                processes.end_all(self._spared)  # also what has a session of its own
            process.tidy_up()
            if process.log.source in self._selector.get_map():
                self._selector.unregister(process.log.source)
            process.log.close()
            process.done.close()
            self._announce(event)

    def _end_below(self, pid: int) -> None:
        """End what a subject has started below the first process of a node, and hear of it."""
        if self._registry is None:
            return
        self._registry.read()
        for child in self._registry.below(pid):
            child.killed = True
            signal_session(child.pid, signal.SIGKILL)
        self._registry.see_off(pid, processes.KILL_TIMEOUT_S)

    def _hear(self, child: Child, ended: bool) -> None:
        """Announce that a process which a subject has started left evidence, or ended."""
        if child.below not in self._ranks:
            return
        above = self._ranks[child.below]
        event = {"event": "gone" if ended else "left", "launch": above.launch, "rank": above.rank}
        told = {"pid": child.pid, "as": child.rank, "trace": child.evidence, "failed": child.failed, "idle": child.idle}
        further = {"steps": child.steps, "killed": child.killed, "unwritten": child.unwritten}
        starved = {"out_of_memory": kills_for_memory() > above.kills}
        self._announce({**event, **told, **further, **starved})

    def _announce(self, event: dict[str, Any]) -> None:
        if os.fstat(self._events).st_ino != self._pipe:
            raise OSError("the descriptor of the fork server's events is another file's now")
        # The clock is the machine's: the parent may read this later than it happened.
        try:
            os.write(self._events, json.dumps({"at": time.monotonic(), **event}).encode() + b"\n")
        except OSError as error:
            raise ParentDisconnected from error


def main() -> None:
    """Serve on standard input and output; what anybody prints goes to standard error."""
    events = os.dup(1)
    os.dup2(2, 1)
    commands = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Server(sys.argv[1], commands, events).serve()


if __name__ == "__main__":
    main()
