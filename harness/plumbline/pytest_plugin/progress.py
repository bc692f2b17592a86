"""The progress and remaining time of a run: a line below pytest's output on a terminal, or lines in a log.

On a terminal, the line is erased and drawn with VT100 escape sequences.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest

NAME = "plumbline-live"

LOG_EVERY_S = 20.0
"""Minimum number of seconds between two lines in a log."""

# Save the cursor, go to the beginning of the next line and erase it; restore the cursor.
_ERASE, _BACK = "\x1b7\x1b[B\r\x1b[2K", "\x1b8"
# Down and up again in the same column: on the last line of the screen this makes room for one more.
_MAKE_ROOM = "\x1bD\x1bM"


def show_progress(config: pytest.Config, cells: Mapping[str, int]) -> None:
    """Show the progress of ``cells`` (ids and numbers of ranks), unless ``-q``, ``-s`` or ``--pdb`` say otherwise."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if (
        not cells
        or terminal is None
        or config.get_verbosity() < 0
        or config.option.capture == "no"
        or config.option.usepdb
        or config.pluginmanager.has_plugin(NAME)
    ):
        return
    if not terminal.isatty():

        def write(line: str) -> None:
            terminal.ensure_newline()
            terminal.write_line(line)

        config.pluginmanager.register(ProgressLog(write, cells), NAME)
    elif hasattr(terminal, "write_raw") and terminal.hasmarkup:  # pytest has write_raw since version 9
        config.pluginmanager.register(ProgressLine(terminal.write_raw, cells), NAME)


class Progress:
    """Cells that have ended and those that are left."""

    def __init__(self, cells: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        # Launching and judging take about as long as training one rank, and ranks share the cores.
        self._left = {cell: 1 + ranks for cell, ranks in cells.items()}
        self._cells = len(self._left)
        self._work = sum(self._left.values())
        self._clock = clock
        self._begun = clock()
        self._failing = 0

    @property
    def text(self) -> str:
        words = [f"{self._cells - len(self._left)}/{self._cells} cells", f"{self._failing} failing"]
        left = sum(self._left.values())
        if 0 < left < self._work:
            seconds = (self._clock() - self._begun) / (self._work - left) * left
            words.append(f"about {in_minutes(seconds)} left")
        return " · ".join(words)

    def count(self, report: pytest.TestReport) -> None:
        cell = report.nodeid.rpartition("[")[2].removesuffix("]")
        self._failing += report.failed and cell in self._left
        if report.when == "teardown":
            self._left.pop(cell, None)


class ProgressLog(Progress):
    """A pytest plugin that writes a progress line from time to time, by calling ``write``."""

    def __init__(
        self, write: Callable[[str], None], cells: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(cells, clock)
        self._write = write
        self._written = clock()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count(report)
        if self._left and self._clock() - self._written >= LOG_EVERY_S:
            self._written = self._clock()
            self._write(self.text)


class ProgressLine(Progress):
    """A pytest plugin that keeps a progress line on a terminal. ``write`` writes raw text to the terminal."""

    def __init__(
        self, write: Callable[..., None], cells: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(cells, clock)
        self._write = write
        self._shown = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, object, object]:
        return (yield from self._below_output())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        self.count(report)
        return (yield from self._below_output())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self) -> Generator[None, object, object]:
        return (yield from self._below_output())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._erase()

    def _below_output(self) -> Generator[None, object, object]:
        self._erase()
        result = yield
        if self._left:
            width = shutil.get_terminal_size((100, 24)).columns
            self._write(f"{_MAKE_ROOM}{_ERASE}{self.text[: width - 1]}{_BACK}", flush=True)
            self._shown = True
        return result

    def _erase(self) -> None:
        if self._shown:
            self._write(f"{_ERASE}{_BACK}", flush=True)
            self._shown = False


def in_minutes(seconds: float) -> str:
    """Return a duration as minutes and seconds: ``0:05``, ``1:40``, ``1:02:00``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
