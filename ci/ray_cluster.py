"""A small real Ray cluster on one machine: a raylet per node, each with its own name and devices."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from plumbline.trainer.environments import free_port
from plumbline.worker.processes import die_with, end_each
from plumbline.worker.scratch import NODE, Scratch

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0


class RayCluster:
    """``nodes`` raylets with ``cpus`` each, named node0, node1, …; node0 is the head. Its processes have ``variables``.

    ``environment`` has the variables that a process needs to connect.
    """

    def __init__(self, nodes: int, cpus: int, variables: Mapping[str, str] | None = None) -> None:
        self._nodes = nodes
        self._scratch = Scratch.new(NODE, "/tmp")  # short, because socket paths are below it
        size = ["--num-cpus", str(cpus), "--num-gpus", "0", "--object-store-memory", str(80 << 20)]
        size += ["--min-worker-port", "0", "--max-worker-port", "0"]  # any port but the head's
        quiet = ["--disable-usage-stats", "--log-color", "false"]  # the parsed output must not have colors
        self._start = [str(Path(sys.executable).with_name("ray")), "start", "--block", *quiet, *size]
        self._port = free_port()
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = dict(secret)
        # Give ranks the same priority as other launchers do: Ray's default niceness for workers is 15.
        self._variables = {**os.environ, "RAY_worker_niceness": "0", **secret, **(variables or {})}
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RayCluster:
        try:
            for number in range(self._nodes):
                self.start(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, number: int) -> None:
        """Start a node, or restart a killed one; return when Ray reports that it runs."""
        if number == 0:
            place = ["--head", "--port", str(self._port), "--temp-dir", self._scratch.path]
            place += ["--include-dashboard", "false"]
        else:
            place = ["--address", self.environment["RAY_ADDRESS"], "--include-log-monitor", "false"]
        log = Path(self._scratch.path, f"node{number}.log")
        with log.open("wb") as output:
            self._running[number] = subprocess.Popen(
                [*self._start, *place, "--node-name", f"node{number}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # then `ray start` stops its node
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in (printed := log.read_text(errors="replace")):
            if self._running[number].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"node{number} of the Ray cluster did not start: {printed[-2000:]}")
            time.sleep(0.1)
        if number == 0:
            host = re.search(r"Local node IP: (\S+)", printed)
            assert host is not None, printed
            self.environment["RAY_ADDRESS"] = f"{host[1]}:{self._port}"

    def kill(self, number: int) -> None:
        """Kill a node's raylet; `ray start` notices this and exits."""
        (raylet,) = (pid for pid in self._of(number) if _program(pid).endswith("/raylet/raylet"))
        os.kill(raylet, signal.SIGKILL)

    def bring_back(self, number: int) -> None:
        """Restart a killed node."""
        self._running.pop(number).wait(END_TIMEOUT_S)
        self.start(number)

    @property
    def processes(self) -> frozenset[int]:
        """All processes of the cluster, including idle workers but not actors."""
        return frozenset(pid for number in self._running for pid in self._of(number) if not is_actor(pid))

    def close(self) -> None:
        """Stop all nodes, the head last, and remove the cluster's files."""
        all_of_them = {pid for number in self._running for pid in self._of(number)}
        for number in sorted(self._running, reverse=True):
            node = self._running.pop(number)
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(END_TIMEOUT_S)
        end_each(lambda: {pid for pid in all_of_them if _program(pid)})
        self._scratch.leave(remove=True)

    def _of(self, number: int) -> frozenset[int]:
        pid = self._running[number].pid
        with suppress(psutil.NoSuchProcess):
            return frozenset({pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))})
        return frozenset({pid})


def is_actor(pid: int) -> bool:
    """Return whether this process is, or was started as, the actor of a node's server."""
    return _program(pid).startswith("ray::NodeServer")


def _program(pid: int) -> str:
    """Return a process's program, or "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""
