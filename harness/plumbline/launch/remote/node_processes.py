"""The local processes that start the nodes' servers, and their output. They end together with the servers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from plumbline.core.errors import LaunchError
from plumbline.launch.start_wait import cpu_seconds

_END_TIMEOUT_S = 30.0
"""Time for the commands to end after SIGTERM, and after SIGKILL."""


class NodeProcesses:
    """Runs ``commands`` until their nodes have ended. If the user starts the nodes, there are no commands.

    Each command reads the secret ``told`` from standard input, which ssh encrypts. By default, ssh forwards no
    variables, and other users can see a command's arguments.

    Raises:
        LaunchError: A command cannot be run.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], told: str = "") -> None:
        self._errors = os.memfd_create("plumbline")
        self._running: list[subprocess.Popen[bytes]] = []
        self._open = True
        for command in commands:
            try:
                started = subprocess.Popen(
                    [*command],
                    stdin=subprocess.PIPE,
                    stdout=self._errors,
                    stderr=self._errors,
                    env=environment,
                    # Ctrl-C must reach this process alone, which then ends the nodes in order.
                    start_new_session=True,
                )
            except OSError as error:
                self.close(0)
                raise LaunchError(f"the nodes cannot be started: {error}") from error
            self._running.append(started)
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # reported later, when the node of this command does not connect
                started.stdin.write(told.encode())
                started.stdin.flush()
            with suppress(BrokenPipeError):
                started.stdin.close()

    @property
    def ended(self) -> str | None:
        """Which command has ended, and how; None if none has ended."""
        for process in self._running:
            if process.poll() is not None:
                return f"{_program(process)} ended with exit code {process.returncode}"
        return None

    @property
    def output(self) -> str:
        """The last output of the commands and their nodes. If there is none, a sentence about the commands."""
        size = os.fstat(self._errors).st_size
        printed = os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace").strip()
        if printed:
            return printed
        if not self._running:
            return "nodes are started by hand, and none has printed anything here"
        programs = ", ".join(f"{_program(process)} ({process.pid})" for process in self._running)
        return f"{programs} printed nothing and used {self.cpu_seconds():.1f} s of CPU time"

    def cpu_seconds(self) -> float:
        return cpu_seconds(process.pid for process in self._running)

    def wait_for_output(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and self.ended is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, grace: float) -> None:
        """Wait ``grace`` seconds for the commands to end, then end them."""
        if not self._open:
            return
        self._open = False
        self._wait(grace)
        for step in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._running:
                step(process)
            self._wait(_END_TIMEOUT_S)
        os.close(self._errors)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in list(self._running):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                self._running.remove(process)


def _program(process: subprocess.Popen[bytes]) -> str:
    assert isinstance(process.args, list)
    return str(process.args[0])
