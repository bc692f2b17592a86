"""What a machine must have for a run, question by question: each answers with lines that say ok, or what to do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness.machine.cpu_load import load, work_done
from harness.machine.doctor.communication import ports, ranks
from harness.machine.doctor.gpus import devices, links
from harness.machine.doctor.installations import python, subjects, torch_build
from harness.machine.doctor.limits import clock, cores, disk, limits, memory, shared_memory
from harness.machine.doctor.probe_result import ProbeResult

QUIET = 30.0
"""Seconds without any work done for the probes, after which one without an answer hangs."""

LONGEST = 600.0
"""Seconds for all probes together, however much work is done."""

_LEAST_WORK = 0.02
"""Seconds of computing, or of waiting for a processor, that count as work."""

_POLL = 0.2

Probe = Callable[[], Iterator[ProbeResult]]


def probes(report_dir: Path) -> dict[str, Probe]:
    """Return every question by its name, in the order of the answers. The load is measured before any is asked."""
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
    asked: Mapping[str, Probe], quiet: float = QUIET, longest: float = LONGEST
) -> Iterator[tuple[str, ProbeResult]]:
    """Yield the lines of each question with its name, in order, as they are answered; all are asked at once.

    One that raises says so. One without an answer is waited for as long as work is done for any of them, however slow
    the machine is: it hangs where nothing has been computed for ``quiet`` seconds, and nothing waited for a processor.
    After ``longest`` seconds no question is waited for.
    """
    watch = _Watch()
    for name, answers in [(name, _asked(question)) for name, question in asked.items()]:
        while True:
            try:
                line = answers.get(timeout=min(_POLL, quiet))
            except queue.Empty:
                if watch.quiet > quiet:
                    found = f"no answer, and nothing has been computed for {watch.quiet:.0f} s"
                    yield (
                        name,
                        ProbeResult(found, "it hangs: see what it waits for, a device, a file system or the network"),
                    )
                    break
                if watch.seconds > longest:
                    yield (
                        name,
                        ProbeResult(f"no answer within {longest:.0f} s", "ask again when the machine is less busy"),
                    )
                    break
                continue
            if line is None:
                break
            yield name, line


class _Watch:
    """Tells for how long nothing has been done for the probes. Where the system does not say, work goes on."""

    def __init__(self) -> None:
        self._begun = self._since = time.monotonic()
        self._done = work_done()

    @property
    def seconds(self) -> float:
        """The time since the probes were asked."""
        return time.monotonic() - self._begun

    @property
    def quiet(self) -> float:
        """The time since there was work."""
        done = work_done()
        if done is None or self._done is None or abs(done - self._done) > _LEAST_WORK:
            self._done, self._since = done, time.monotonic()
        return time.monotonic() - self._since


def _asked(question: Probe) -> queue.SimpleQueue[ProbeResult | None]:
    """Ask in a thread that nobody has to wait for, and return where the lines will be; None is the end of them."""
    answers: queue.SimpleQueue[ProbeResult | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            for line in question():
                answers.put(line)
        except Exception as error:  # whatever is wrong with a machine, the other probes are asked
            answers.put(
                ProbeResult(f"cannot be found out ({type(error).__name__}: {error})", "see to what the error names")
            )
        answers.put(None)

    threading.Thread(target=answer, daemon=True).start()
    return answers
