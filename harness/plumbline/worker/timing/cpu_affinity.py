"""The core on which a rank's round begins, if its device is the CPU.

The cores of a machine are not equally fast: on a virtual machine, another guest may use the other half of a core for
seconds or minutes, and steps then take half as long again. The scheduler does not move a process that computes alone,
so one of two trainers that take turns could have the slow core for a whole launch.
"""

from __future__ import annotations

import os
from contextlib import suppress


def begin_on_core(number: int) -> None:
    """Move this thread to the core with this ``number``, modulo their count; the scheduler may then move it again."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    with suppress(OSError):  # this is not allowed, or the core is offline
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
