"""Measures how busy the CPUs are, and the CPU time of this process and its descendants."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import psutil

_PROBE = """
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.1:
    pass
print((time.monotonic() - began) / (time.process_time() - used))
"""


def slowdown(processes: int) -> float:
    """Return the wall time of a computation over its CPU time, in the slowest of several ``processes``."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(process.communicate()[0] or 1) for process in running)


def cpu_seconds_of_others() -> float:
    """Return the CPU time, in seconds, of this process's other threads and of its descendants that still run."""
    process, calling = psutil.Process(), threading.get_native_id()
    seconds = sum(one.user_time + one.system_time for one in process.threads() if one.id != calling)
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            seconds += sum(child.cpu_times()[:2])
    return float(seconds)
