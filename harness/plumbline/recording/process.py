"""A process that trains: its place in the process group, its end, and the processes that are forked from it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import util
from typing import Any
from uuid import uuid4

import torch.distributed

_FIRST_PRIORITY = 1000
"""The priority of a finalizer of multiprocessing that runs before all others."""


def rank_and_world() -> tuple[int, int] | None:
    """Return the rank of this process and the size of the world, None if there is no process group."""
    group = torch.distributed
    return (group.get_rank(), group.get_world_size()) if group.is_available() and group.is_initialized() else None


def group_name() -> str:
    """Return a name that all ranks of the default process group share, and no other group has; "" if there is none."""
    try:
        c10d: Any = torch.distributed.distributed_c10d
        store = c10d.PrefixStore("plumbline group", c10d._get_default_store())
        return str(store.compare_set("name", "", uuid4().hex).decode())  # the name of the rank that asks first
    except Exception:  # there is no group, or its store cannot do that
        return ""


def follow_processes(
    ends: Callable[[], None], forked: Callable[[], None], begins: Callable[[], None] = lambda: None
) -> None:
    """Follow the end of this process, and processes that are forked from it.

    Args:
        ends: called before anything is shut down when this process, or one that was forked from it, ends; maybe twice.
        forked: called in a process that was just forked.
        begins: called in a forked process when multiprocessing begins to run it.
    """

    def began(_: object = None) -> None:
        util.Finalize(None, ends, exitpriority=_FIRST_PRIORITY)  # multiprocessing runs no functions of atexit
        begins()

    atexit.register(ends)
    os.register_at_fork(after_in_child=forked)
    util.register_after_fork(began, began)
    util.Finalize(None, ends, exitpriority=_FIRST_PRIORITY)  # if multiprocessing runs this process already
