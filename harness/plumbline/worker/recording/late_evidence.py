"""Writes the evidence that there is so far, where the launcher requests it of a rank that is late.

The request is a signal, and a thread waits for it, because the main thread may be inside of a call that never returns.
Where that call holds the interpreter's lock the request has no effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

REQUEST: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None
"""The signal; None where the system has none that programs leave alone. Ranks block it, so it ends no process."""


def block_requests() -> None:
    """Block the signal in this thread and in all threads and processes that it starts from now on."""
    if REQUEST is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {REQUEST})


def answer_requests(answer: Callable[[], None]) -> None:
    """Call ``answer`` in a thread of its own each time the signal comes. Its exceptions are ignored."""
    if REQUEST is None:
        return
    request = REQUEST

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # the thread that trains dumps its stack
        while True:
            signal.sigwait({request})
            with suppress(Exception):  # the main thread may be changing what is to be written
                answer()

    threading.Thread(target=wait, name="plumbline-late", daemon=True).start()
