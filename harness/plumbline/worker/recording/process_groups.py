"""Keeps a subject's process groups alive until the process ends, and reports when the subject destroys them.

In torch 2.13 releasing the last reference to a gloo group can hang for ever: its destructor joins gloo's threads while
it holds the interpreter's lock, and one of those threads waits for that lock to release a Python object. A
``DistributedDataParallel`` object that outlives ``destroy_process_group()`` holds that last reference. A group that is
never released cannot hang; the operating system takes its sockets and memory when the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import torch.distributed


def keep_process_groups(before_destruction: Callable[[], None]) -> None:
    """Keep every process group of this process, those that exist and those to come, for the rest of its life.

    ``before_destruction`` is called each time before the default group is destroyed, while everything still works.
    """
    if not torch.distributed.is_available():
        return
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

    for group in list(c10d._world.pg_map):
        _never_release(group)
    # Scripts import init_process_group and destroy_process_group by name, often before this is called. What these call
    # in turn is found in their module at each call.
    register, set_default = c10d._register_process_group, c10d._update_default_pg

    def registering(name: str, group: Any, *further: Any) -> Any:
        _never_release(group)
        return register(name, group, *further)

    def setting_default(group: Any) -> None:
        if group is None:
            before_destruction()
        set_default(group)

    c10d._register_process_group, c10d._update_default_pg = registering, setting_default


def _never_release(group: Any) -> None:
    # A list of this module would be cleared when the interpreter is shut down, as it is at the end of a script.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
