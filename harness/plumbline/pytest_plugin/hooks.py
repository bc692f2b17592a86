"""The pytest hooks of a session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from plumbline.core.outcome import Outcome
from plumbline.engine.cells_in_flight import AHEAD
from plumbline.planning.plan import Planned
from plumbline.pytest_plugin.session import Session
from plumbline.pytest_plugin.terminal_summary import write_summary
from plumbline.pytest_plugin.xdist_transport import outcome_of
from plumbline.results.records import KNOWN, UNEXPECTED_PASS

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
        self._session.upcoming = _cells_of(following)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return _STATUS.get(outcome_of(report) or "")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._session.close()
        self._session.recording.finish(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        every = self._session.options.show_unsupported
        write_summary(terminalreporter, self._session.recording, interrupted=interrupted, show_unsupported=every)


def _cells_of(items: Iterable[pytest.Item]) -> list[Planned]:
    """Return the cells of tests, up to the first test without a cell to train."""
    cells = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        cell = callspec.params.get("plumbline_cell") if callspec else None
        if cell is None:
            break
        cells.append(cell)
    return cells
