"""All probes of this machine by name, and running them beside each other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from plumbline.machine.cpu_load import work_done
from plumbline.machine.doctor.communication import ports, ranks
from plumbline.machine.doctor.gpus import devices, links
from plumbline.machine.doctor.installations import python, subjects, torch_build
from plumbline.machine.doctor.limits import clock, cores, disk, limits, load, memory, shared_memory
from plumbline.machine.doctor.probe_result import ProbeResult

IDLE_LIMIT_S = 30.0
"""A probe without a result hangs if no processor time has been used for the probes for so long."""

TOTAL_LIMIT_S = 600.0
"""For all probes together, however much processor time they use."""

_LEAST_WORK_S = 0.02
"""Processor time, or waiting for a processor, that counts as work."""

_POLL_S = 0.2

Probe = Callable[[], Iterator[ProbeResult]]


def probes(report_dir: Path) -> dict[str, Probe]:
    """Return every probe by its name, in the order of the results. The load is measured now, before any of them."""
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
    """Run all probes at once; yield the results of each with its name, in order, as they arrive.

    A probe that raises has a result that says so. One without a result is waited for as long as any of them uses
    processor time, however slow the machine is: it hangs if none was used, or waited for, for ``quiet`` seconds. After
    ``longest`` seconds no probe is waited for.
    """
    activity = _Activity()
    for name, results in [(name, _start(probe)) for name, probe in named.items()]:
        while True:
            try:
                result = results.get(timeout=min(_POLL_S, quiet))
            except queue.Empty:
                if activity.quiet > quiet:
                    found = f"no answer, and nothing has been computed for {activity.quiet:.0f} s"
                    yield name, ProbeResult(found, "it hangs: a device, a file system or the network does not respond")
                    break
                if activity.seconds > longest:
                    found = f"no answer within {longest:.0f} s"
                    yield name, ProbeResult(found, "try again when the machine is less busy")
                    break
                continue
            if result is None:
                break
            yield name, result


class _Activity:
    """For how long the probes have used no processor time. Where the system does not report it, they always do."""

    def __init__(self) -> None:
        self._begun = self._since = time.monotonic()
        self._done = work_done()

    @property
    def seconds(self) -> float:
        """The time since the probes were started."""
        return time.monotonic() - self._begun

    @property
    def quiet(self) -> float:
        """The time since work was last seen."""
        done = work_done()
        if done is None or self._done is None or abs(done - self._done) > _LEAST_WORK_S:
            self._done, self._since = done, time.monotonic()
        return time.monotonic() - self._since


def _start(probe: Probe) -> queue.SimpleQueue[ProbeResult | None]:
    """Run a probe in a daemon thread, and return the queue of its results; None is the end of them."""
    results: queue.SimpleQueue[ProbeResult | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for result in probe():
                results.put(result)
        except Exception as error:  # whatever is wrong with the machine, the other probes go on
            results.put(
                ProbeResult(f"cannot be found out ({type(error).__name__}: {error})", "look into what the error names")
            )
        results.put(None)

    threading.Thread(target=run, daemon=True).start()
    return results
