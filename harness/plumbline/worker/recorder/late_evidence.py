"""Writes the evidence so far: before process groups are destroyed, and when the launcher requests it.

The request is a signal, and a separate thread waits for it, because the main thread may be inside of a call that never
returns. If that call holds the interpreter's lock, the request has no effect.

In torch 2.13 releasing the last reference to a gloo group can hang for ever: its destructor joins gloo's threads while
it holds the interpreter's lock, and one of those threads waits for that lock to release a Python object. A
``DistributedDataParallel`` object that outlives ``destroy_process_group()`` holds that last reference. A group that is
never released cannot hang; the operating system takes its sockets and memory when the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

REQUEST: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None
"""The signal; None on systems without signals that programs leave alone. Ranks block it, so it ends no process."""


def block_requests() -> None:
    """Block the signal in this thread and in all threads and processes that it starts from now on."""
    if REQUEST is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {REQUEST})


def answer_requests(answer: Callable[[], None]) -> None:
    """Call ``answer`` in a separate thread each time the signal arrives. Its exceptions are ignored."""
    if REQUEST is None:
        return
    request = REQUEST

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # the training thread handles this one
        while True:
            signal.sigwait({request})
            with suppress(Exception):  # the main thread may be changing the data
                answer()

    threading.Thread(target=wait, name="plumbline-late", daemon=True).start()


def keep_process_groups(before_destruction: Callable[[], None]) -> None:
    """Keep all existing and future process groups of this process alive until it ends.

    ``before_destruction`` is called each time before the default group is destroyed, while the group still works.
    """
    import torch.distributed  # a fork server without torch imports this file, too

    if not torch.distributed.is_available():
        return
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

    for group in list(c10d._world.pg_map):
        _never_release(group)
    # Scripts import init_process_group and destroy_process_group by name, often before this is called. The functions
    # that these call are looked up in their module at each call.
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
    # A list in this module would be cleared when the interpreter shuts down, for example at the end of a script.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
