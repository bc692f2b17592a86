"""An exception of a trainer as text: its message, and the calls that led to it."""

from __future__ import annotations

import os
import traceback

_AROUND = (
    ("worker", "rank.py"),
    ("multiprocessing", "process.py"),
    ("multiprocessing", "spawn.py"),
)
"""The callers of trainers, by folder and file: Plumbline, and multiprocessing."""

_LONGEST_SOURCE = 100
"""Characters of a line of source."""


def in_words(raised: BaseException) -> str:
    """Return the error's type and message, even if converting the error to text raises."""
    try:
        return f"{type(raised).__name__}: {str(raised).strip()}".removesuffix(": ")
    except Exception as error:
        return f"{type(raised).__name__}, whose message raises {type(error).__name__}"


def calls_in(raised: BaseException) -> str:
    """Return the trainer's calls that led to an exception, one per line with its source, the innermost first."""
    calls = list(traceback.extract_tb(raised.__traceback__))
    while calls and tuple(calls[0].filename.split(os.sep)[-2:]) in _AROUND:
        del calls[0]
    return "\n".join(map(_in_a_line, calls[::-1]))


def _in_a_line(call: traceback.FrameSummary) -> str:
    place = f"{'/'.join(call.filename.split('/')[-2:])}:{call.lineno} in {call.name}"
    source = " ".join((call.line or "").split())[:_LONGEST_SOURCE]
    return f"{place}: {source}" if source else place
