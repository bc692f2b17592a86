"""The fork server: imports torch and the subject once, then forks a rank for each assignment it is given.

It reads commands, one JSON line each, from its standard input, and answers with events on the descriptor that its
standard output was. Ranks write their own events there too: a line is shorter than PIPE_BUF, so lines stay whole.
When its input ends, because the parent closed it or died, it ends every rank and itself.

CUDA and threads must not be touched here: neither survives a fork.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1


class Server:
    """Forks ranks on command and reports what becomes of them."""

    def __init__(self, locator: str, commands: int, events: int) -> None:
        self._locator = locator
        self._commands = commands
        self._events = events
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> launch, rank
        self._subjects: dict[str, Any] = {}

    def serve(self) -> None:
        """Announce the subjects, then follow commands until they end."""
        from harness.core.errors import PlumblineError

        try:
            self._preload()
        except PlumblineError as error:
            self._announce({"event": "refused", "message": str(error)})
            return
        except Exception:
            self._announce({"event": "refused", "message": traceback.format_exc()[-3000:]})
            return
        declared = [found.declaration() for found in self._subjects.values()]
        self._announce({"event": "ready", "subjects": declared, "pid": os.getpid()})
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends us in order.
        selector = selectors.DefaultSelector()
        selector.register(wake, selectors.EVENT_READ)
        selector.register(self._commands, selectors.EVENT_READ)
        lines = self._lines()
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._commands in ready:
                for command in next(lines):
                    if command is None:
                        self._end_all(signal.SIGKILL)
                        return
                    self._follow(command)

    def _preload(self) -> None:
        """Import what every rank would otherwise import for itself (about two seconds each)."""
        import torch
        import torch._dynamo  # the first DistributedDataParallel(...) imports it
        import torch.distributed
        import torch.nn.parallel

        from harness.subjects.load import load

        torch.set_num_threads(1)
        self._subjects = {found.name: found for found in load(self._locator)}
        import harness.worker.rank  # noqa: F401

        # What is imported stays. A rank that collects garbage need not walk through it, nor copy its pages.
        gc.collect()
        gc.freeze()

    def _lines(self) -> Iterator[list[dict[str, Any] | None]]:
        rest = b""
        while True:
            chunk = os.read(self._commands, 1 << 20)
            if not chunk:
                yield [None]
                continue
            *whole, rest = (rest + chunk).split(b"\n")
            yield [json.loads(line) for line in whole]

    def _follow(self, command: dict[str, Any]) -> None:
        if command["command"] == "launch":
            for values in command["assignments"]:
                self._fork(command["subject"], values)
        elif command["command"] == "signal":
            for pid, (launch, _) in self._ranks.items():
                if launch == command["launch"]:
                    _signal(pid, command["signal"])

    def _fork(self, subject: str, values: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._ranks[pid] = (values["launch"], values["rank"])
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._commands)
            _die_with(server)
            from harness.worker.assignment import Assignment
            from harness.worker.rank import run

            run(Assignment.from_json(values), self._subjects[subject], self._announce)
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
            # What the rank left in its session goes with it.
            _signal(pid, signal.SIGKILL)
            launch, rank = self._ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self._announce({"event": "exit", "launch": launch, "rank": rank, "code": code})

    def _end_all(self, number: int) -> None:
        for pid in self._ranks:
            _signal(pid, number)
        for pid in self._ranks:
            os.waitpid(pid, 0)

    def _announce(self, event: dict[str, Any]) -> None:
        # The clock is the machine's: the parent may read this later than it happened.
        os.write(self._events, json.dumps({**event, "at": time.monotonic()}).encode() + b"\n")


def _signal(pid: int, number: int) -> None:
    """Signal a rank and all of its session; before it has one, itself alone."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when the server dies. Elsewhere than on Linux there is no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(70)


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
