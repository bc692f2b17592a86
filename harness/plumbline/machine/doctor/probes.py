"""All probes of this machine by name, and a function that runs them in parallel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from plumbline.machine.doctor import ProbeResult
from plumbline.machine.doctor.installations import devices, links, ports, python, ranks, subjects, torch_build
from plumbline.machine.doctor.limits import clock, cores, disk, limits, load, memory, shared_memory
from plumbline.machine.hardware import cpu_seconds_of_others

IDLE_LIMIT_S = 30.0
"""A probe without a result hangs if the probes have used no CPU time for this long."""

TOTAL_LIMIT_S = 600.0
"""For all probes together, however much CPU time they use."""

_LEAST_WORK_S = 0.02
"""CPU time that counts as work: two ticks of the kernel's clock."""

_POLL_S = 0.2

Probe = Callable[[], Iterator[ProbeResult]]


def probes(report_dir: Path) -> dict[str, Probe]:
    """Return the probes by name, in the order of their results. The load is measured now, before any of them runs."""
    measured = load()
    return {
        "load": lambda: iter([measured]),
        "python": python,
        "torch": torch_build,
        "devices": devices,
        "links": links,
        "ranks": ranks,
        "ports": ports,
        "shared memory": shared_memory,
        "limits": limits,
        "cores": cores,
        "memory": memory,
        "clock": clock,
        "disk": lambda: disk(report_dir),
        "subjects": subjects,
    }


def run_probes(
    named: Mapping[str, Probe], quiet: float = IDLE_LIMIT_S, longest: float = TOTAL_LIMIT_S
) -> Iterator[tuple[str, ProbeResult]]:
    """Run all probes at once; yield their results with their names, in order, as they arrive.

    A probe that raises yields a result with the error. A probe hangs if it has no result while all probes together
    have used no CPU time for ``quiet`` seconds. After ``longest`` seconds, no probe is waited for.
    """
    activity = _Activity()
    for name, results in [(name, _start(probe)) for name, probe in named.items()]:
        while True:
            try:
                result = results.get(timeout=min(_POLL_S, quiet))
            except queue.Empty:
                if (idle := activity.idle()) > quiet:
                    found = f"no answer, and no CPU time used for {idle:.0f} s"
                    yield name, ProbeResult(found, "it hangs: a device, a file system or the network does not respond")
                    break
                if activity.elapsed() > longest:
                    found = f"no answer within {longest:.0f} s"
                    yield name, ProbeResult(found, "try again when the machine is less busy")
                    break
                continue
            if result is None:
                break
            yield name, result


class _Activity:
    def __init__(self) -> None:
        self._begun = self._since = time.monotonic()
        self._used = cpu_seconds_of_others()

    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def idle(self) -> float:
        used = cpu_seconds_of_others()
        if abs(used - self._used) > _LEAST_WORK_S:  # it is less where a process has ended
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since


def _start(probe: Probe) -> queue.SimpleQueue[ProbeResult | None]:
    results: queue.SimpleQueue[ProbeResult | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for result in probe():
                results.put(result)
        except Exception as error:  # whatever is wrong with the machine, the other probes go on
            results.put(
                ProbeResult(f"the probe failed ({type(error).__name__}: {error})", "look at what the error names")
            )
        results.put(None)

    threading.Thread(target=run, daemon=True).start()
    return results
