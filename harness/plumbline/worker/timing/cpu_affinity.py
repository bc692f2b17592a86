"""The core on which a rank's round begins, where its device is the cpu.

The cores of one machine are not equally fast: on a virtual one another guest may use the other half of one of them,
for seconds or minutes, and steps take half as long again there. A process that computes alone stays where it is, so of
two trainers in turns one would have the fast core for all of a launch, and the other one the slow.
"""

from __future__ import annotations

import os
from contextlib import suppress


def begin_on_core(number: int) -> None:
    """Move this thread to one of its cores, which ``number`` counts round and round; from there it may go anywhere."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    with suppress(OSError):  # it is not allowed to, or the core has gone offline
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
