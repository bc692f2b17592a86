"""Judges a trace in a separate process, so that several cells are judged at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from plumbline.devices.counting import available
from plumbline.engine.examine import Examined
from plumbline.worker.processes import die_with


def number_of_judges() -> int:
    """Return how many traces can be judged at once; 0 if this process has to judge them itself.

    Judges are forks, so that they have the causes, checks and workloads registered in this process. Forking is not
    possible when autograd has threads for devices, and not reliable on macOS.
    """
    if sys.platform != "linux" or torch.cuda.is_available() or available()[1]:
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST) if cores > 1 else 0


MOST = 4
"""The largest number of judges. Each needs memory for a trace, and one launch at a time does not keep more busy."""

YIELD = 5
"""The niceness of judges. Ranks have a time limit: with two nice judges, ranks get at least as much of two cores as
with one judge at the ranks' own niceness."""


class JudgeProcess:
    """A fork of this process that calls ``judge``."""

    def __init__(self, judge: Callable[[], Examined]) -> None:
        self._judge = judge
        context = multiprocessing.get_context("fork")
        self.connection, send_to = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(judge, send_to, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Forking is safe here: the threads of rendezvous stores hold no lock that a judge takes.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self._process.start()
        send_to.close()

    def wait(self) -> Examined:
        """Return what ``judge`` returns. If the fork failed, call ``judge`` in this process."""
        try:
            examined: Examined = self.connection.recv()
        except (EOFError, OSError):
            examined = self._judge()
        finally:
            self.end()
        return examined

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _run(judge: Callable[[], Examined], connection: Connection, parent: int) -> None:
    die_with(parent)
    os.nice(YIELD)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    gc.freeze()  # the parent's objects may own threads, which a fork does not have
    with suppress(Exception):
        connection.send(judge())
