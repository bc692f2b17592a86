"""How busy the processors are, measured, and how much processor time this process and its descendants have used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from plumbline.worker.processes import present

_PROBE = """
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.1:
    pass
print((time.monotonic() - began) / (time.process_time() - used))
"""


def slowdown(processes: int) -> float:
    """Return the wall time of a computation over its processor time, in the slowest of several ``processes``."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(process.communicate()[0] or 1) for process in running)


def work_done() -> float | None:
    """Return the seconds for which this process and its descendants have run on a processor, or waited for one.

    The calling thread is not counted. None where the system does not report it.
    """
    own = str(threading.get_native_id())
    if not Path(f"/proc/self/task/{own}/schedstat").exists():
        return None
    nanoseconds = 0
    for process in (os.getpid(), *present()):
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{process}/task"):
                if thread != own:
                    ran, waited, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
                    nanoseconds += int(ran) + int(waited)
    return nanoseconds / 1e9
