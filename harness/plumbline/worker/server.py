"""The fork server: it imports torch and the subject once, then forks a rank for each assignment.

It receives commands from the launcher and announces events to it (``plumbline.worker.launcher_link``). When its input
ends, or at SIGTERM, it ends all ranks and itself. Processes that ranks start become its children when the ranks end,
and end with the launch. It writes the ranks' output to their logs.

This process must not use devices or threads: neither survives a fork.
"""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlumblineError, SubjectError
from plumbline.worker.child_registry import Child, Registry
from plumbline.worker.launcher_link import LauncherLink, PipeLink
from plumbline.worker.processes import (
    KILL_TIMEOUT_S,
    adopt,
    descendants,
    die_with,
    end_all,
    has_exited,
    is_stopped,
    kills_for_memory,
    restore_signals,
    signal_session,
    wakeup_pipe,
)
from plumbline.worker.rank_log import Log
from plumbline.worker.recorder.late_evidence import REQUEST
from plumbline.worker.scratch import NODE, Scratch


@dataclass(frozen=True)
class ForkedRank:
    """A rank of a launch. ``done`` is memory that it shares with the server: its number of completed steps.

    ``kills`` is the number of out-of-memory kills before its fork. ``scratch`` is a folder for temporary files if the
    subject starts the ranks of the node, else None.
    """

    launch: int
    rank: int
    evidence: str
    log: Log
    done: mmap.mmap
    kills: int
    scratch: Scratch | None

    @classmethod
    def prepare(cls, assignment: Mapping[str, Any]) -> ForkedRank:
        """Prepare a rank before its fork, from the JSON of its assignment."""
        Path(assignment["evidence"]).unlink(missing_ok=True)  # an earlier rank may have left it
        return cls(
            launch=assignment["launch"],
            rank=assignment["rank"],
            evidence=assignment["evidence"],
            log=Log(assignment["log"]),
            done=mmap.mmap(-1, 8),
            kills=kills_for_memory(),
            scratch=Scratch.new(NODE) if assignment["whole_node"] else None,
        )

    @property
    def ids(self) -> dict[str, int]:
        return {"launch": self.launch, "rank": self.rank}

    @property
    def steps(self) -> int:
        return int.from_bytes(self.done[:], "little")

    @property
    def out_of_memory(self) -> bool:
        return kills_for_memory() > self.kills

    @property
    def has_evidence(self) -> bool:
        """Whether this rank has written evidence. A subject that starts its ranks leaves that to them."""
        return self.scratch is None and os.path.exists(self.evidence)

    def remove_scratch(self) -> None:
        """Remove the folder for temporary files; the processes that could write to it have ended."""
        if self.scratch:
            self.scratch.leave(remove=True)


class ParentDisconnected(OSError):  # noqa: N818
    """The connection to the launcher has ended."""


class Server:
    """Forks ranks on command, and reports how they end."""

    def __init__(self, locator: str, link: LauncherLink, describe: Callable[[], dict[str, Any]] = dict):
        """``describe`` returns more fields for the event ``ready``; it is called after torch was imported."""
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
        """Announce the subjects, then follow commands; return whether a command (or SIGTERM) ended the server."""
        parent = os.getppid()
        adopt()
        die_with(parent)  # it reads no commands during the imports
        try:
            self._subjects = preload(self._locator)
        except PlumblineError as error:
            self._announce({"event": "refused", "message": str(error)})
            return True
        except Exception:
            self._announce({"event": "refused", "message": traceback.format_exc()[-3000:]})
            return True
        die_with(parent, number=0)
        self._spared = descendants()  # libraries may start processes when they are imported
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
            print(f"plumbline.worker: lost the connection to the launcher: {error}", file=sys.stderr)
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
            except OSError as error:  # for example, the network was cut
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
        """Signal a rank and the processes below it.

        Except with SIGKILL, this also requests the evidence so far, and continues stopped processes, which could not
        write their stacks otherwise.
        """
        if number == signal.SIGKILL:
            # The processes below first: some end normally when the first process has ended.
            self._end_below(pid)
            signal_session(pid, number)
            return
        below = [child.pid for child in self._registry.below(pid)] if self._registry else []
        stopped = is_stopped(pid)
        self._announce({"event": "late", **process.ids, "steps": process.steps, "stopped": stopped})
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
            from plumbline.worker import rank
            from plumbline.worker.assignment import Assignment

            assignment = Assignment.from_json(values)
            declared = declared_for(subject, assignment.cell.backend, self._subjects)
            if process.scratch:
                rank.lead_node(assignment, declared, self._announce, address, process.scratch.path)
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
            signal_session(pid, signal.SIGKILL)  # the processes that it left in its session
            process = self._ranks.pop(pid)
            event = {
                "event": "exit",
                **process.ids,
                "code": os.waitstatus_to_exitcode(status),
                "steps": process.steps,
                # A rank that has closed its descriptors cannot announce its evidence.
                "evidence": process.has_evidence,
                "out_of_memory": process.out_of_memory,
                "at": time.monotonic(),
            }
            if not self._ranks:
                end_all(self._spared)  # also processes with sessions of their own
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
                **above.ids,
                **{name: getattr(child, name) for name in ("pid", "failed", "idle", "steps", "killed", "unwritten")},
                "as": child.rank,
                "trace": child.evidence,
                "orphaned": ended and has_exited(child.below),
                "out_of_memory": above.out_of_memory,
            }
        )

    def _announce(self, event: dict[str, Any]) -> None:
        # The time is taken here, because the launcher may read the event later.
        try:
            self._link.announce(json.dumps({"at": time.monotonic(), **event}).encode())
        except OSError as error:
            raise ParentDisconnected(str(error)) from error


def preload(locator: str) -> list[Any]:
    """Import torch, the rank's code and the subjects behind ``locator``; return the subjects."""
    try:
        import torch
    except ImportError as error:
        raise SubjectError(
            f"its interpreter, {sys.executable}, cannot import torch ({error}). Install torch there."
        ) from error
    import torch._dynamo  # the first DistributedDataParallel(...) imports it
    import torch.distributed
    import torch.nn.parallel

    from plumbline.subjects.load import load

    # Do not run DTensor operations here over a fake process group: their cache would survive the fork. Meshes with
    # equal ranks are equal keys, but cached values have the coordinates of the process that filled the cache.
    torch.set_num_threads(1)
    subjects = load(locator)
    import plumbline.worker.rank  # noqa: F401
    from plumbline.devices.calls import why_no_fork

    if (label := why_no_fork()) is not None:
        raise SubjectError(
            f"importing {locator} starts {label}, which does not survive the fork of the ranks. Move the code that "
            "uses a device (.cuda(), torch.cuda.get_device_name(), …) into the training function."
        )
    # The garbage collection of a rank then skips what was imported, and does not copy its pages.
    gc.collect()
    gc.freeze()
    return subjects


def main() -> None:
    """Serve on standard input and output. Other output goes to standard error."""
    events = os.dup(1)
    os.dup2(2, 1)
    commands = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Server(sys.argv[1], PipeLink(commands, events)).serve()


class ConnectivityProbe:
    """Answers the launcher's commands about the connections between its nodes."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the event that answers ``command``: ``listen``, ``reach`` or ``port``.

        Other nodes reach this one if they can connect; their connections are never accepted.
        """
        if command["command"] == "listen":
            self.close()
            family = socket.AF_INET6 if ":" in command["address"] else socket.AF_INET
            self._listener = socket.create_server((command["address"], 0), family=family, backlog=1024)
            return {"event": "listens", "port": self._listener.getsockname()[1]}
        if command["command"] == "reach":
            return {"event": "reached", "failed": reach(command["peers"], command["seconds"])}
        from plumbline.trainer.environments import free_port  # it imports torch

        return {"event": "port", "port": free_port()}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def reach(peers: Mapping[str, Sequence[str | int]], seconds: float) -> dict[str, str]:
    """Connect to every (address, port) in parallel; return the reasons of those that failed, by key."""
    failed: dict[str, str] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for key, (address, port) in peers.items():
            way = socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET)
            way.setblocking(False)
            code = way.connect_ex((address, port))
            if code in (0, errno.EINPROGRESS):
                selector.register(way, selectors.EVENT_WRITE, key)
            else:
                failed[key] = os.strerror(code)
                way.close()
        while (waiting := list(selector.get_map().values())) and (left := deadline - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                code = ready.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if code:
                    failed[ready.data] = os.strerror(code)
                selector.unregister(ready.fileobj)
                ready.fileobj.close()  # type: ignore[union-attr]
        for late in waiting:
            failed[late.data] = f"no answer in {seconds:g} s"
            late.fileobj.close()  # type: ignore[union-attr]
    return failed
