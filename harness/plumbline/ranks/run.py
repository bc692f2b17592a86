"""Runs a function on several ranks: forks their supervisor and waits for their ends."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

from plumbline.core.errors import LaunchError
from plumbline.launch.this_machine import why_too_many
from plumbline.ranks.rank_main import RankEnd, RankReport, Terminal
from plumbline.ranks.supervisor import Order, supervise
from plumbline.ranks.world import World


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
