"""Cells that a subject does not declare: they are selected like any other, counted and recorded, and are no tests.

Under xdist every worker leaves out the same ones, and tells the controller when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.pytest_plugin.conformance_case import ConformanceCase
from harness.pytest_plugin.session import nothing_to_run
from harness.results.json_lines import record_of
from harness.results.records import Result

if TYPE_CHECKING:
    import pytest

    from harness.pytest_plugin.session import Session

_LEFT_OUT = "plumbline-left-out"
_PARAMETERS = ("plumbline_cell", "plumbline_benchmark")


def leave_out(config: pytest.Config, session: Session, items: list[pytest.Item]) -> None:
    """Deselect the tests of cells that their subjects do not declare; who names one by its id gets it."""
    named = {argument.rpartition("[")[2].removesuffix("]") for argument in config.args if "[" in argument}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    results: list[Result] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec else {}
        planned = next((parameters[name] for name in _PARAMETERS if name in parameters), None)
        if planned is None or planned.refusal is None or planned.cell.id in named:
            kept.append(item)
            continue
        left.append(item)
        results += ConformanceCase(session, planned, item).declined()
    if not left:
        return
    items[:] = kept
    config.hook.pytest_deselected(items=left)
    session.leave_out(results)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_LEFT_OUT] = [result.model_dump_json() for result in results]


def take_over(config: pytest.Config, session: Session | None, told: Mapping[str, Any]) -> None:
    """Take in the controller what a worker has left out; without a session no cell at all was to be run."""
    results = [record for line in told.get(_LEFT_OUT, ()) if isinstance(record := record_of(line.encode()), Result)]
    if not results:
        return
    if session is not None:
        session.leave_out(results)
    elif not config.pluginmanager.has_plugin(_LEFT_OUT):
        config.pluginmanager.register(_NothingToRun(results), _LEFT_OUT)


class _NothingToRun:
    """Says in the controller why there was no cell to run."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(nothing_to_run(self._results))
