"""Cells that a subject does not declare: they are selected, counted and recorded like any other, but have no test.

Under xdist every worker deselects the same ones, and sends their records to the controller when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.pytest_plugin.conformance_case import ConformanceCase
from harness.pytest_plugin.terminal_summary import nothing_to_run
from harness.results.json_lines import record_of
from harness.results.records import Result

if TYPE_CHECKING:
    import pytest

    from harness.pytest_plugin.session import Session

_UNDECLARED = "plumbline-undeclared"


def deselect_undeclared(
    config: pytest.Config, session: Session, items: list[pytest.Item], fixtures: Sequence[str]
) -> None:
    """Deselect the tests of cells that their subjects do not declare, except those named by their id.

    ``fixtures`` are the names of those that hold a planned cell.
    """
    named = {argument.rpartition("[")[2].removesuffix("]") for argument in config.args if "[" in argument}
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    results: list[Result] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec else {}
        planned = next((parameters[name] for name in fixtures if name in parameters), None)
        if planned is None or planned.refusal is None or planned.cell.id in named:
            kept.append(item)
            continue
        deselected.append(item)
        results += ConformanceCase(session, planned, item).declined()
    if not deselected:
        return
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)
    session.recording.add_undeclared(results)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_UNDECLARED] = [result.model_dump_json() for result in results]


def receive_undeclared(config: pytest.Config, session: Session | None, output: Mapping[str, Any]) -> None:
    """Take the records from a worker's ``output`` in the controller, which has no session if there is no test."""
    records = [record_of(line.encode()) for line in output.get(_UNDECLARED, ())]
    results = [record for record in records if isinstance(record, Result)]
    if not results:
        return
    if session is not None:
        session.recording.add_undeclared(results)
    elif not config.pluginmanager.has_plugin(_UNDECLARED):
        config.pluginmanager.register(_NothingToRun(results), _UNDECLARED)


class _NothingToRun:
    """A pytest plugin that prints in the controller why there was no cell to run."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(nothing_to_run(self._results))
