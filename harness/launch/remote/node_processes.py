"""The processes of this machine that start nodes' servers, and end when they have ended; with what they print."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from harness.core.errors import LaunchError


class NodeProcesses:
    """Runs ``commands`` until their nodes have ended. There may be none: then somebody else starts the nodes.

    Raises:
        LaunchError: one cannot be run.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        self._errors = os.memfd_create("plumbline")
        self._running: list[subprocess.Popen[bytes]] = []
        self._open = True
        for command in commands:
            try:
                started = subprocess.Popen(
                    [*command],
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    env=environment,
                    # Ctrl-C is for this process, which ends the nodes in order.
                    start_new_session=True,
                )
            except OSError as error:
                self.close(0)
                raise LaunchError(f"the nodes cannot be started: {error}") from error
            self._running.append(started)

    @property
    def ended(self) -> str | None:
        """Which of them has ended, and how; None if none has."""
        for one in self._running:
            if one.poll() is not None:
                return f"{one.args[0]} ended with exit code {one.returncode}"  # type: ignore[index]
        return None

    @property
    def said(self) -> str:
        """The end of what they have printed, and their nodes."""
        size = os.fstat(self._errors).st_size
        said = os.pread(self._errors, 2000, max(0, size - 2000)).decode(errors="replace")
        return said.strip() or "nobody said anything"

    def wait_for_words(self, seconds: float) -> None:
        """Wait until one ends: what it has to say of its node comes then."""
        deadline = time.monotonic() + seconds
        while self._running and self.ended is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, grace: float) -> None:
        """Wait so many seconds for all of them to end by themselves, then end them."""
        if not self._open:
            return
        self._open = False
        self._wait(grace)
        for step in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for one in self._running:
                step(one)
            self._wait(30.0)
        os.close(self._errors)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for one in list(self._running):
            try:
                one.wait(max(0.0, deadline - time.monotonic()))
                self._running.remove(one)
            except subprocess.TimeoutExpired:
                continue
