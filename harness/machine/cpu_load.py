"""How busy this machine is, measured, and how much work this process and those below it have done or waited to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from harness.machine.doctor.probe_result import ProbeResult
from harness.machine.hardware import usable_cores
from harness.worker.descendants import present

BUSY = 1.5
"""From so many times its processor time on, a computation says that others want the processors."""

MOST_PROBES = 4

_PROBE = """
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.1:
    pass
print((time.monotonic() - began) / (time.process_time() - used))
"""


def slowdown(probes: int) -> float:
    """Return how many times its processor time a computation takes, of so many beside each other the slowest."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(probes)]
    return max(float(probe.communicate()[0] or 1) for probe in running)


def load() -> ProbeResult:
    """Measure how busy the machine is. A busy one is fit for a run, and slow."""
    cores = usable_cores() or 1
    factor = slowdown(min(cores, MOST_PROBES))
    found = f"computing takes {factor:.1f} × its processor time"
    with suppress(OSError):
        found += f"; load average {os.getloadavg()[0]:.1f} on {cores} cores"
    if factor < BUSY:
        return ProbeResult(found)
    advice = (
        "the machine is busy: a run takes longer (see --time-limit), and speeds measured now are not to be relied on"
    )
    return ProbeResult(found, advice, is_note=True)


def work_done() -> float | None:
    """Return the seconds for which this process and those below it have computed, or waited for a processor.

    The calling thread is left out. None where the system does not say.
    """
    own = str(threading.get_native_id())
    if not Path(f"/proc/self/task/{own}/schedstat").exists():
        return None
    nanoseconds = 0
    for process in (os.getpid(), *present()):
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{process}/task"):
                if thread != own:
                    computed, waited, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
                    nanoseconds += int(computed) + int(waited)
    return nanoseconds / 1e9
