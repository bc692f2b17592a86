"""The tables that pytest prints at the end of a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from plumbline.pytest_plugin.run_recording import RunRecording
from plumbline.report.tables.cells import undeclared_in_words
from plumbline.report.terminal import speed_for_terminal, support_for_terminal
from plumbline.results.records import Result
from plumbline.results.run import read_run

NOTHING_PLANNED = (
    "Nothing to run: no cell matches these options. Change --backends, --workloads or --precisions, or raise --gpus."
)


def write_summary(terminal: Any, recording: RunRecording, *, interrupted: bool, show_unsupported: bool) -> None:
    undeclared = recording.undeclared
    if recording.path is None:
        if undeclared:
            terminal.write_line(nothing_to_run(undeclared))
        return
    columns = shutil.get_terminal_size((100, 24)).columns
    width = max(72 if terminal.isatty() else 100, columns)
    run = read_run(recording.path)
    tables: dict[str, Callable[..., str]] = {"speed": speed_for_terminal}
    if not all(cell.measured for cell in run.header.planned):
        support = partial(support_for_terminal, every=show_unsupported, counted=not undeclared)
        tables = {"support": support, **tables}
    for title, table in tables.items():
        if lines := table(run, width=width, colour=terminal.hasmarkup).rstrip("\n"):
            terminal.section(title)
            terminal.write_line(lines)
    if undeclared:
        terminal.write_line(_count(undeclared))
    terminal.write_line(f"report: {recording.path / 'report.html'}")
    if interrupted and run.missing:
        done = len(run.header.planned) - len(run.missing)
        terminal.write_line(f"interrupted after {done} of {len(run.header.planned)} cells; resume with:")
        terminal.write_line(f"  {recording.resume_command}")


def nothing_to_run(undeclared: Iterable[Result]) -> str:
    return f"Nothing to run: {_count(undeclared)}"


def _count(undeclared: Iterable[Result]) -> str:
    return f"{undeclared_in_words(undeclared)}; --show-unsupported lists them"
