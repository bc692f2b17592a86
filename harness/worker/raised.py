"""What a trainer raised, in words."""

from __future__ import annotations

import os
import traceback

_AROUND = (
    ("worker", "rank.py"),
    ("worker", "first.py"),
    ("multiprocessing", "process.py"),
    ("multiprocessing", "spawn.py"),
)
"""Who calls a trainer, by folder and file: the harness, and what starts processes."""


def in_words(raised: BaseException) -> str:
    """Return the error in a line or more; some raise when they are asked what they are."""
    try:
        return f"{type(raised).__name__}: {raised}".strip()
    except Exception as error:
        return f"{type(raised).__name__}, whose message raises {type(error).__name__}"


def calls_in(raised: BaseException) -> str:
    """Return the trainer's calls in which something was raised, a line each, the innermost first."""
    calls = list(traceback.extract_tb(raised.__traceback__))
    while calls and tuple(calls[0].filename.split(os.sep)[-2:]) in _AROUND:
        del calls[0]
    return "\n".join(f"{'/'.join(call.filename.split('/')[-2:])}:{call.lineno} in {call.name}" for call in calls[::-1])
