"""On a terminal, a line below pytest's output shows the progress; in a log, a line from time to time."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from plumbline.pytest_plugin.progress import LOG_EVERY_S, ProgressLine, ProgressLog, in_minutes

ROWS, COLUMNS = 12, 100

# Variables that override the terminal's width and colours.
OF_TERMINALS = ("CI", "COLUMNS", "LINES", "NO_COLOR", "PY_COLORS", "FORCE_COLOR")

SUITE = """
import pytest

@pytest.mark.parametrize("cell", [f"cell-{number}" for number in range(40)])
def test_cell(cell):
    assert cell != "cell-3"
"""

CONFTEST = """
import pytest
from plumbline.pytest_plugin.progress import show_progress

CELLS = {f"cell-{number}": 1 for number in range(40)}

def pytest_collection_finish(session):
    show_progress(session.config, CELLS)

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node):
    show_progress(node.config, CELLS)
"""


class Screen:
    """The parts of a VT100 that pytest and the line need. ``seen`` has all bottom lines that were ever shown."""

    SEQUENCE = re.compile(r"\x1b(?:\[([\d;]*)([A-Za-z])|([78DM]))")

    def __init__(self) -> None:
        self.rows = [[" "] * COLUMNS for _ in range(ROWS)]
        self.gone: list[str] = []
        self.row = self.column = 0
        self._saved = (0, 0)
        self.seen: set[str] = set()

    @property
    def text(self) -> str:
        """All that was ever written and not erased, scrolled off or not."""
        return "\n".join([*self.gone, *("".join(row).rstrip() for row in self.rows)])

    def feed(self, data: str) -> None:
        """Process a program's output."""
        place = 0
        while place < len(data):
            sequence = self.SEQUENCE.match(data, place)
            if sequence:
                self._obey(*sequence.groups())
                place = sequence.end()
                continue
            self._write(data[place])
            place += 1

    def _obey(self, numbers: str | None, letter: str | None, single: str | None) -> None:
        if single == "7":
            self._saved = (self.row, self.column)
            self.seen |= {line for row in self.rows if "cells ·" in (line := "".join(row).rstrip())}
        elif single == "8":
            self.row, self.column = self._saved
            self.seen |= {line for row in self.rows if "cells ·" in (line := "".join(row).rstrip())}
        elif single == "D":
            self._down()
        elif single == "M":
            self.row = max(0, self.row - 1)
        elif letter == "B":
            self.row = min(ROWS - 1, self.row + 1)
        elif (numbers, letter) == ("2", "K"):
            self.rows[self.row] = [" "] * COLUMNS
        else:
            assert letter == "m", f"an unknown sequence {numbers!r} {letter!r}"

    def _write(self, sign: str) -> None:
        if sign == "\n":
            self._down()
        elif sign == "\r":
            self.column = 0
        elif sign != "\x07":
            if self.column == COLUMNS:
                self.column = 0
                self._down()
            self.rows[self.row][self.column] = sign
            self.column += 1

    def _down(self) -> None:
        if self.row < ROWS - 1:
            self.row += 1
        else:
            self.gone.append("".join(self.rows.pop(0)).rstrip())
            self.rows.append([" "] * COLUMNS)


def on_a_terminal(folder, *arguments):
    """Run pytest in ``folder`` on its own terminal; return its screen and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in OF_TERMINALS}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm"},
    )
    os.close(theirs)
    screen, decoder, rest = Screen(), codecs.getincrementaldecoder("utf-8")(), ""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # the last process that held the terminal has ended
            break
        text = rest + decoder.decode(chunk)
        whole = text.rfind("\x1b", -8) if "\x1b" in text[-8:] else len(text)
        screen.feed(text[:whole])
        rest = text[whole:]
    screen.feed(rest)
    os.close(ours)
    return screen, process.wait()


@pytest.fixture
def suite(tmp_path):
    """A folder with forty tests that are cells, one of which fails."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def without_times(text):
    """Return the lines that pytest writes in every run."""
    return [re.sub(r"in \d.*s", "in …", line).strip("= ") for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("arguments", [(), ("-v",), ("-n", "2")], ids=["dots", "verbose", "xdist"])
def test_the_line_is_there_while_cells_run_and_gone_afterwards(suite, arguments):
    screen, code = on_a_terminal(suite, *arguments)
    assert code == 1
    said = " ".join(screen.seen)
    assert "39/40 cells · 1 failing" in said
    assert re.search(r"cells · \d failing · about \d+:\d\d left", said)
    assert "cells ·" not in screen.text
    assert "1 failed, 39 passed" in screen.text


def test_pytest_s_own_output_is_what_it_is_without_the_line(suite):
    screen, _ = on_a_terminal(suite)
    assert screen.seen
    (suite / "conftest.py").unlink()
    plain, _ = on_a_terminal(suite)
    assert not plain.seen
    assert without_times(screen.text) == without_times(plain.text)


@pytest.mark.parametrize("arguments", [("-q",), ("-s",), ("--pdb",), ("--color=no",)], ids=" ".join)
def test_the_line_is_left_out_where_it_would_be_in_the_way(suite, arguments):
    (suite / "test_suite.py").write_text(SUITE.replace('"cell-3"', '"none"'))
    screen, code = on_a_terminal(suite, *arguments)
    assert code == 0
    assert not screen.seen


def test_nothing_is_written_where_there_is_no_terminal(suite):
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=suite, capture_output=True)
    assert b"cells \xc2\xb7" not in done.stdout
    assert b"\x1b7" not in done.stdout


def test_a_run_of_the_suite_has_the_line(project):
    screen, code = on_a_terminal(project.root, "suites/", "--gpus", "2", "--workloads", "mlp", "--precisions", "32")
    assert code == 0
    assert any(line.startswith(("5/6 cells", "4/6 cells")) for line in screen.seen), screen.text
    assert "cells ·" not in screen.text
    assert "report.html" in screen.text
    names = {file.name for file in (project.root / "reports" / "latest").iterdir()}
    assert {"report.html", "report.md"} <= names


class Report:
    """The used parts of a test report."""

    def __init__(self, cell, when="call", failed=False):
        self.nodeid, self.when, self.failed = f"suite.py::test_cell[{cell}]", when, failed


def ended(line, cell, *, failed=False):
    """End a cell's test."""
    for report in (Report(cell, "setup"), Report(cell, "call", failed), Report(cell, "teardown")):
        making_way = line.pytest_runtest_logreport(report)
        next(making_way)
        with pytest.raises(StopIteration):
            making_way.send(None)


def test_the_time_left_follows_from_the_ranks_that_are_left():
    now = [0.0]
    line = ProgressLine(lambda text, flush: None, {"one": 1, "two": 2, "eight": 8}, clock=lambda: now[0])
    assert line.text == "0/3 cells · 0 failing"
    now[0] = 10.0
    ended(line, "one")
    assert line.text == "1/3 cells · 0 failing · about 1:00 left", "two shares of work took 10 s, twelve are left"
    ended(line, "two", failed=True)
    ended(line, "no cell of ours", failed=True)
    assert line.text.startswith("2/3 cells · 1 failing · about 0:18")
    ended(line, "eight")
    assert line.text == "3/3 cells · 1 failing"


def test_in_a_log_there_is_a_line_now_and_then():
    now, written = [0.0], []
    log = ProgressLog(written.append, {f"cell-{index}": 1 for index in range(4)}, clock=lambda: now[0])
    for index in range(4):
        now[0] += LOG_EVERY_S / 2
        log.pytest_runtest_logreport(Report(f"cell-{index}", "call"))
        log.pytest_runtest_logreport(Report(f"cell-{index}", "teardown"))
    assert written == ["1/4 cells · 0 failing · about 1:00 left", "3/4 cells · 0 failing · about 0:13 left"]


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (5.4, "0:05"), (100, "1:40"), (3720, "1:02:00")])
def test_durations_are_read_as_people_read_them(seconds, words):
    assert in_minutes(seconds) == words
