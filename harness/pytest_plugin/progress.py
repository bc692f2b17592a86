"""One line below pytest's own output while cells run: how many are done, how many fail, how long it will take.

Only on a terminal. pytest writes where it always does; the line below is wiped before anybody writes and drawn again
afterwards, by sequences that every terminal since the VT100 knows. Nothing is left that a crash could leave behind.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Mapping

import pytest

NAME = "plumbline-live"

# Save the cursor, go to the beginning of the next line, wipe it; then come back.
_WIPE, _BACK = "\x1b7\x1b[B\r\x1b[2K", "\x1b8"
# Down and up again in the same column: on the last line of the screen this makes room for one more.
_MAKE_ROOM = "\x1bD\x1bM"


def follow(config: pytest.Config, cells: Mapping[str, int]) -> None:
    """Show how far ``cells`` are: their ids, and how many ranks each has; nothing where nobody would see it.

    A user's ``-s`` or ``--pdb`` needs the terminal for itself.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if (
        cells
        and hasattr(terminal, "write_raw")  # since pytest 9; and there may be no terminal reporter at all
        and terminal.isatty()
        and terminal.hasmarkup
        and config.get_verbosity() >= 0
        and config.option.capture != "no"
        and not config.option.usepdb
        and not config.pluginmanager.has_plugin(NAME)
    ):
        config.pluginmanager.register(ProgressLine(terminal.write_raw, cells), NAME)


class ProgressLine:
    """The line. ``write`` puts text on the terminal as it is; ``cells`` are ids, with the number of ranks of each."""

    def __init__(
        self, write: Callable[..., None], cells: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A cell is launched and judged once, and trained by each rank: its ranks and one more say how long it takes.
        self._left = {cell: 1 + ranks for cell, ranks in cells.items()}
        self._cells = len(self._left)
        self._work = sum(self._left.values())
        self._write = write
        self._clock = clock
        self._begun = clock()
        self._failing = 0
        self._shown = False

    @property
    def text(self) -> str:
        """What the line says."""
        words = [f"{self._cells - len(self._left)}/{self._cells} cells", f"{self._failing} failing"]
        left = sum(self._left.values())
        if 0 < left < self._work:
            seconds = (self._clock() - self._begun) / (self._work - left) * left
            words.append(f"about {in_minutes(seconds)} left")
        return " · ".join(words)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, object, object]:
        """Make way for the name of a test, or of its file."""
        return (yield from self._making_way())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Count, and make way for a test's sign."""
        cell = report.nodeid.rpartition("[")[2].removesuffix("]")
        self._failing += report.failed and cell in self._left
        if report.when == "teardown":
            self._left.pop(cell, None)
        return (yield from self._making_way())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self) -> Generator[None, object, object]:
        """Make way for how far pytest is."""
        return (yield from self._making_way())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave the terminal to the summary."""
        self._wipe()

    def _making_way(self) -> Generator[None, object, object]:
        self._wipe()
        result = yield
        if self._left:
            width = shutil.get_terminal_size((100, 24)).columns
            self._write(f"{_MAKE_ROOM}{_WIPE}{self.text[: width - 1]}{_BACK}", flush=True)
            self._shown = True
        return result

    def _wipe(self) -> None:
        if self._shown:
            self._write(f"{_WIPE}{_BACK}", flush=True)
            self._shown = False


def in_minutes(seconds: float) -> str:
    """Return a duration as people read it: ``0:05``, ``1:40``, ``1:02:00``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
