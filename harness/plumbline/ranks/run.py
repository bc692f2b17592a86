"""Runs a function on several ranks, in the process that calls: prepares, forks a supervisor, waits for the ends."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from plumbline.core.errors import LaunchError
from plumbline.ranks.channel import Channel
from plumbline.ranks.rank import Terminal
from plumbline.ranks.rank_end import How, RankEnd
from plumbline.ranks.supervisor import Order, PickledEnd, opened, supervise
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

    In each the environment variables that torchrun sets are there, and so is the default process group. The function
    may be a closure, and finds whatever this process has in memory; what it returns is pickled. Each rank has one
    thread for computing. When one fails, the others have a second to end. Nothing that they start outlives this call.

    Args:
        function: Called with a :class:`~plumbline.ranks.rank.Terminal`, whose ``rank`` tells which one it is.
        ranks: Number of ranks, at least 1.
        timeout: Seconds after which ranks that have not ended are ended.
        backend: Of the default process group; None is nccl where there is a CUDA device for each rank, else gloo.
        init: Whether the default process group is there; without it the function can initialise its own.
        capture: Whether to keep what ranks print, or let it go where this process prints.
        describe: Called on a rank with what ``function`` raised; its result, or the traceback where it raises itself,
            becomes the ``description``.

    Raises:
        LaunchError: the ranks cannot be started here; the message says what to do.
    """
    import torch._dynamo
    import torch.distributed  # the first DistributedDataParallel(...) imports it, which takes a second

    if init and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise LaunchError(
            "this process is in a process group already, and ranks that are forked from it cannot form one of their "
            "own: call torch.distributed.destroy_process_group() first"
        )
    world = World.prepare(ranks, backend, init)
    order = Order(function, describe, timeout, capture)
    here, there = Channel.pair()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):  # what is buffered now would be printed by each rank
            stream.flush()  # type: ignore[union-attr]
    parent = os.getpid()
    with warnings.catch_warnings():
        # Since Python 3.12, where this process has threads. Only what torch does after a fork matters here: it computes
        # in the thread that remains.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            raise LaunchError(f"no process can be started for the ranks: {error.strerror}; see ulimit -u") from error
    if not pid:
        here.close()
        supervise(world, order, there, parent)
    there.close()
    world.listener.close()
    try:
        ends = here.receive()
    finally:
        here.close()  # if it still runs it ends its ranks, and itself
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if not isinstance(ends, list):
        raise LaunchError(f"the process that watches the ranks has ended: {ends or 'it was killed'}")
    return tuple(map(_end, ends))


def _end(end: PickledEnd) -> RankEnd:
    outcome = opened(end.outcome)
    raised = end.how is How.RAISED
    return RankEnd(
        rank=end.rank,
        how=end.how,
        seconds=end.seconds,
        value=None if raised else outcome,
        error=outcome if raised else None,
        description=opened(end.description),
        code=end.code,
        calls=end.calls,
        stdout=end.stdout,
        stderr=end.stderr,
    )
