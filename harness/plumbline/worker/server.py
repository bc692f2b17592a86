"""The fork server: imports torch and the subject once, then forks a rank for each assignment it receives.

It gets commands from the launcher and announces events to it, on its machine by its standard input and output
(``plumbline.worker.launcher_link``). When its input ends, because the launcher closed it or died, or at SIGTERM, it
ends every rank and itself. Processes that ranks start become its children when the ranks end, and end with the launch;
what they print goes through it into their logs.

CUDA and threads must not be touched here: neither survives a fork.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from plumbline.core.errors import PlumblineError
from plumbline.worker.child_registry import Child, Registry
from plumbline.worker.connectivity import ConnectivityProbe
from plumbline.worker.forked_rank import ForkedRank
from plumbline.worker.launcher_link import LauncherLink, PipeLink
from plumbline.worker.preload import preload
from plumbline.worker.processes import (
    KILL_TIMEOUT_S,
    adopt,
    descendants,
    die_with,
    end_all,
    has_exited,
    is_stopped,
    restore_signals,
    signal_session,
    wakeup_pipe,
)
from plumbline.worker.recording.late_evidence import REQUEST


class ParentDisconnected(OSError):  # noqa: N818
    """The launcher cannot be reached any more."""


class Server:
    """Forks ranks on command and reports how they end."""

    def __init__(self, locator: str, link: LauncherLink, describe: Callable[[], dict[str, Any]] = dict):
        """``describe`` returns further fields of the event ``ready``, once torch has been imported."""
        self._describe = describe
        self._connectivity = ConnectivityProbe()
        self._locator = locator
        self._link = link
        self._ranks: dict[int, ForkedRank] = {}  # by pid
        self._registry: Registry | None = None
        self._selector = selectors.DefaultSelector()
        self._spared: frozenset[int] = frozenset()
        self._subjects: list[Any] = []

    def serve(self) -> bool:
        """Announce the subjects, then follow commands until they end; return whether an end was commanded."""
        parent = os.getppid()
        adopt()
        die_with(parent)  # while it imports it reads no commands
        try:
            self._subjects = preload(self._locator)
        except PlumblineError as error:
            self._announce({"event": "refused", "message": str(error)})
            return True
        except Exception:
            self._announce({"event": "refused", "message": traceback.format_exc()[-3000:]})
            return True
        die_with(parent, number=0)
        self._spared = descendants()  # a library may have started processes when it was imported
        declared = [found.declaration() for found in self._subjects]
        self._announce({"event": "ready", "subjects": declared, "pid": os.getpid(), **self._describe()})
        wake = wakeup_pipe()
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(self._link, selectors.EVENT_READ)
        if self._link.from_ranks is not None:
            self._selector.register(self._link.from_ranks, selectors.EVENT_READ)
        try:
            return self._obey(wake)
        except ParentDisconnected as error:
            print(f"plumbline.worker: the launcher is lost: {error}", file=sys.stderr)
            return False
        finally:
            for pid in self._ranks:
                signal_session(pid, signal.SIGKILL)
            end_all(self._spared)
            for process in self._ranks.values():
                process.remove_scratch()

    def _obey(self, wake: int) -> bool:
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
            try:
                if self._link.from_ranks in ready:
                    self._link.forward()
                commands = self._link.receive() if self._link.fileno() in ready else []
            except OSError as error:  # as where a network was cut
                raise ParentDisconnected(str(error)) from error
            if commands is None:
                return False
            for command in map(json.loads, commands):
                if command["command"] == "end":
                    return True
                self._follow(command)

    def _follow(self, command: dict[str, Any]) -> None:
        if command["command"] == "launch":
            self._connectivity.close()
            for values in command["assignments"]:
                self._fork(command["subject"], values)
        elif command["command"] == "signal":
            for pid, process in self._ranks.items():
                if process.launch == command["launch"]:
                    self._signal(pid, process, command["signal"])
        elif command["command"] == "workloads":
            from plumbline.worker.import_workloads import import_workloads

            self._announce(import_workloads(command["locators"]))
        else:
            self._announce(self._connectivity.answer(command))

    def _signal(self, pid: int, process: ForkedRank, number: int) -> None:
        """Signal a rank and those below it.

        With any signal but SIGKILL its evidence so far is requested too, and it is continued if it was stopped: else it
        could not dump its stacks.
        """
        if number == signal.SIGKILL:
            # Those below first: some end normally when the first process has ended.
            self._end_below(pid)
            signal_session(pid, number)
            return
        below = [child.pid for child in self._registry.below(pid)] if self._registry else []
        stopped = is_stopped(pid)
        self._announce({"event": "late", **process.place, "steps": process.steps, "stopped": stopped})
        request = () if REQUEST is None else (REQUEST,)
        for one in (*below, pid):
            for sent in (number, *request, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(one, sent)

    def _fork(self, subject: str, values: dict[str, Any]) -> None:
        server = os.getpid()
        process = ForkedRank.prepare(values)
        if process.scratch and self._registry is None:
            self._registry = Registry(self._announce_child)
            self._selector.register(self._registry, selectors.EVENT_READ, self._registry)
        pid = os.fork()
        if pid:
            os.close(process.log.sink)
            self._selector.register(process.log.source, selectors.EVENT_READ, process.log)
            self._ranks[pid] = process
            return
        try:
            for descriptor in (1, 2):
                os.dup2(process.log.sink, descriptor)
            os.close(process.log.sink)
            for other in (process, *self._ranks.values()):
                other.log.close_in_fork()
            restore_signals()
            self._link.close_in_fork()
            address = self._registry.address if self._registry else ""
            if self._registry:
                self._registry.close()
            die_with(server)
            from plumbline.core.backend import declared_for
            from plumbline.worker import node_leader, rank
            from plumbline.worker.assignment import Assignment

            assignment = Assignment.from_json(values)
            declared = declared_for(subject, assignment.cell.backend, self._subjects)
            if process.scratch:
                node_leader.run(assignment, declared, self._announce, address, process.scratch.path)
            else:
                rank.run(assignment, declared, self._announce, process.done)
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
            # Processes that the rank left in its session end with it.
            signal_session(pid, signal.SIGKILL)
            process = self._ranks.pop(pid)
            event = {
                "event": "exit",
                **process.place,
                "code": os.waitstatus_to_exitcode(status),
                "steps": process.steps,
                # A rank that has closed its descriptors cannot announce that it has written evidence.
                "evidence": process.has_evidence,
                "out_of_memory": process.out_of_memory,
                "at": time.monotonic(),
            }
            if not self._ranks:
                end_all(self._spared)  # also what has a session of its own
            process.remove_scratch()
            if process.log.source in self._selector.get_map():
                self._selector.unregister(process.log.source)
            process.log.close()
            process.done.close()
            self._announce(event)

    def _end_below(self, pid: int) -> None:
        if self._registry is None:
            return
        self._registry.read()
        for child in self._registry.below(pid):
            child.killed = True
            signal_session(child.pid, signal.SIGKILL)
        self._registry.wait_for_ends(pid, KILL_TIMEOUT_S)

    def _announce_child(self, child: Child, ended: bool) -> None:
        if child.below not in self._ranks:
            return
        above = self._ranks[child.below]
        self._announce(
            {
                "event": "gone" if ended else "left",
                **above.place,
                "pid": child.pid,
                "as": child.rank,
                "trace": child.evidence,
                "failed": child.failed,
                "idle": child.idle,
                "steps": child.steps,
                "killed": child.killed,
                "orphaned": ended and has_exited(child.below),
                "unwritten": child.unwritten,
                "out_of_memory": above.out_of_memory,
            }
        )

    def _announce(self, event: dict[str, Any]) -> None:
        # The clock is the machine's: the parent may read this later than it happened.
        try:
            self._link.announce(json.dumps({"at": time.monotonic(), **event}).encode())
        except OSError as error:
            raise ParentDisconnected(str(error)) from error


def main() -> None:
    """Serve on standard input and output. What ranks print goes to standard error."""
    events = os.dup(1)
    os.dup2(2, 1)
    commands = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Server(sys.argv[1], PipeLink(commands, events)).serve()
