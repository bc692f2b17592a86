"""Answers the launcher's question to a rank that is late: what evidence is there so far?

The question is a signal, and a thread waits for it, because the main thread may be inside of a call that never returns.
It gets no answer where that call holds the interpreter's lock.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

QUESTION: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None
"""The signal; None where the system has none that programs leave alone. Ranks block it, so it ends nobody."""


def block_question() -> None:
    """Block the signal in this thread and in all threads and processes that it starts from now on."""
    if QUESTION is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {QUESTION})


def answer_question(answer: Callable[[], None]) -> None:
    """Call ``answer`` in a thread of its own each time the signal comes. What it raises is ignored."""

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a stack is asked of the thread that trains
        while True:
            signal.sigwait({QUESTION})
            with suppress(Exception):  # the main thread may be changing what is to be written
                answer()

    if QUESTION is not None:
        threading.Thread(target=wait, name="plumbline-late", daemon=True).start()
