"""What a machine must have for a run, question by question: each answers with lines that say ok, or what to do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness.doctor.communication import ports, ranks
from harness.doctor.devices import devices, links
from harness.doctor.limits import clock, cores, disk, limits, memory, shared_memory
from harness.doctor.line import Line
from harness.doctor.software import python, subjects, torch_build

SECONDS = 12.0
"""For all questions together."""

Question = Callable[[], Iterator[Line]]


def questions(report_dir: Path) -> dict[str, Question]:
    """Return every question by its name, in the order of the answers."""
    return {
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


def examination(asked: Mapping[str, Question], seconds: float = SECONDS) -> Iterator[tuple[str, Line]]:
    """Yield the lines of each question with its name, in order, as they are answered; all are asked at once.

    One that raises, or has not answered after ``seconds``, says so.
    """
    end = time.monotonic() + seconds
    for name, answers in [(name, _asked(question)) for name, question in asked.items()]:
        try:
            while (line := answers.get(timeout=max(0.0, end - time.monotonic()))) is not None:
                yield name, line
        except queue.Empty:
            yield name, Line(f"no answer within {seconds:.0f} s", "ask again when the machine is less busy")


def _asked(question: Question) -> queue.SimpleQueue[Line | None]:
    """Ask in a thread that nobody has to wait for, and return where the lines will be; None is the end of them."""
    answers: queue.SimpleQueue[Line | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            for line in question():
                answers.put(line)
        except Exception as error:  # whatever is wrong with a machine, the other questions are asked
            answers.put(Line(f"cannot be found out ({type(error).__name__}: {error})", "see to what the error names"))
        answers.put(None)

    threading.Thread(target=answer, daemon=True).start()
    return answers
