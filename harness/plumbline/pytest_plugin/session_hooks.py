"""The pytest hooks of a session, the cells that it leaves out, and the tables that pytest prints at its end.

Cells that a subject does not declare are recorded and counted, but not run. Under xdist, every worker leaves out the
same cells and reports them to the controller when it ends. If the options plan no cell at all, pytest creates a
placeholder test, which is left out too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import pytest

from plumbline.core.outcome import Outcome
from plumbline.engine.cells_in_flight import AHEAD
from plumbline.pytest_plugin.cases import ConformanceCase
from plumbline.pytest_plugin.run_on_disk import outcome_of
from plumbline.pytest_plugin.session import Session
from plumbline.report.tables.cells import undeclared_in_words
from plumbline.report.terminal import speed_for_terminal, support_for_terminal
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Result
from plumbline.results.run import read_run, record_of

NOTHING_PLANNED = (
    "Nothing to run: no cell matches these options. Change --backends, --workloads or --precisions, or raise --gpus."
)
_UNDECLARED = "plumbline-undeclared"
_NOTHING_PLANNED = "plumbline-nothing-planned"
_STATUS = {
    Outcome.DEVIATES.value: ("deviates", "d", "DEVIATES"),
    Outcome.UNSUPPORTED.value: ("unsupported", "u", "UNSUPPORTED"),
    Outcome.ERRORED.value: ("failed", "E", "ERRORED"),
    Outcome.CRASHED.value: ("failed", "C", "CRASHED"),
    Outcome.TIMED_OUT.value: ("failed", "T", "TIMED_OUT"),
    KNOWN: ("known", "k", "KNOWN"),
    UNEXPECTED_PASS: ("failed", "X", "UNEXPECTED PASS"),
}
"""pytest's category, letter and word for each outcome of a cell."""


class SessionHooks:
    """The hooks of one session, as a pytest plugin."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        following = item.session.items[item.session.items.index(item) + 1 :][:AHEAD]
        if hasattr(item.config, "workerinput"):  # a worker of xdist knows one test ahead
            following = [nextitem] if nextitem else []
        cells = (cell_of(one, ("plumbline_cell",)) for one in following)
        self._session.upcoming = list(takewhile(lambda cell: cell is not None, cells))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return _STATUS.get(outcome_of(report) or "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._session.close()
        self._session.run_on_disk.finish(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        write, recording = terminalreporter.write_line, self._session.run_on_disk
        undeclared = recording.undeclared
        if recording.path is None:
            if undeclared:
                write(_nothing_to_run(undeclared))
            return
        width = max(72 if terminalreporter.isatty() else 100, shutil.get_terminal_size((100, 24)).columns)
        run = read_run(recording.path)
        tables: dict[str, Callable[..., str]] = {"speed": speed_for_terminal}
        if not all(cell.measured for cell in run.header.planned):
            every = self._session.options.show_unsupported
            tables = {"support": partial(support_for_terminal, every=every, counted=not undeclared), **tables}
        for title, table in tables.items():
            if lines := table(run, width=width, colour=terminalreporter.hasmarkup).rstrip("\n"):
                terminalreporter.section(title)
                write(lines)
        if undeclared:
            write(_count(undeclared))
        write(f"report: {recording.path / 'report.html'}")
        if exitstatus == pytest.ExitCode.INTERRUPTED and run.missing:
            done = len(run.header.planned) - len(run.missing)
            write(f"interrupted after {done} of {len(run.header.planned)} cells; resume with:")
            write(f"  {recording.resume_command}")


def _nothing_to_run(undeclared: Iterable[Result]) -> str:
    return f"Nothing to run: {_count(undeclared)}"


def _count(undeclared: Iterable[Result]) -> str:
    return f"{undeclared_in_words(undeclared)}; --show-unsupported lists them"


def cell_of(item: pytest.Item, fixtures: Sequence[str]) -> Any:
    """Return a test's planned cell, or pytest's placeholder for an empty plan; None if the test is not of a cell."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    return next((parameters[name] for name in fixtures if name in parameters), None)


def leave_out_placeholders(config: pytest.Config, items: list[pytest.Item], fixtures: Sequence[str]) -> None:
    """Remove the placeholder tests of empty plans. If no cell is left, the summary says so."""
    cells = [cell_of(item, fixtures) for item in items]
    kept = [item for item, cell in zip(items, cells, strict=True) if cell is None or hasattr(cell, "cell")]
    if len(kept) == len(items):
        return
    items[:] = kept
    if any(cell_of(item, fixtures) is not None for item in kept):
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput[_NOTHING_PLANNED] = True
    else:
        _say(config, _NOTHING_PLANNED, NOTHING_PLANNED)


def deselect_undeclared(
    config: pytest.Config, session: Session, items: list[pytest.Item], fixtures: Sequence[str]
) -> None:
    """Deselect the tests of cells that their subjects do not declare, unless the user named their ids."""
    named = {argument.rpartition("[")[2].removesuffix("]") for argument in config.args if "[" in argument}
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    results: list[Result] = []
    for item in items:
        planned = cell_of(item, fixtures)
        if planned is None or planned.refusal is None or planned.cell.id in named:
            kept.append(item)
            continue
        deselected.append(item)
        results += ConformanceCase(session, planned, item).declined()
    if not deselected:
        return
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)
    session.run_on_disk.add_undeclared(results)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_UNDECLARED] = [result.model_dump_json() for result in results]


def receive_undeclared(config: pytest.Config, session: Session | None, output: Mapping[str, Any]) -> None:
    """Take the records from a worker's ``output``. Without a test, the controller has no session."""
    if output.get(_NOTHING_PLANNED):
        _say(config, _NOTHING_PLANNED, NOTHING_PLANNED)
    records = [record_of(line.encode()) for line in output.get(_UNDECLARED, ())]
    results = [record for record in records if isinstance(record, Result)]
    if results and session is not None:
        session.run_on_disk.add_undeclared(results)
    elif results:
        _say(config, _UNDECLARED, _nothing_to_run(results))


def _say(config: pytest.Config, name: str, sentence: str) -> None:
    if not config.pluginmanager.has_plugin(name):
        config.pluginmanager.register(_LastWord(sentence), name)


class _LastWord:
    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self._sentence)
