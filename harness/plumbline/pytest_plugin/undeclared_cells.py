"""Cells without a test: those that a subject does not declare are recorded and counted, but not run.

Under xdist, every worker leaves out the same cells and reports them to the controller when it ends. If the options plan
no cell at all, pytest creates a placeholder test, which is left out too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plumbline.pytest_plugin.conformance_case import ConformanceCase
from plumbline.pytest_plugin.terminal_summary import NOTHING_PLANNED, nothing_to_run
from plumbline.results.records import Result
from plumbline.results.run import record_of

if TYPE_CHECKING:
    import pytest

    from plumbline.pytest_plugin.session import Session

_UNDECLARED = "plumbline-undeclared"
_NOTHING_PLANNED = "plumbline-nothing-planned"


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


def cell_of(item: pytest.Item, fixtures: Sequence[str]) -> Any:
    """Return a test's planned cell, or pytest's placeholder for an empty plan. None: it is not the test of a cell."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    return next((parameters[name] for name in fixtures if name in parameters), None)


def deselect_undeclared(
    config: pytest.Config, session: Session, items: list[pytest.Item], fixtures: Sequence[str]
) -> None:
    """Deselect the tests of cells that their subjects do not declare, unless the user named their ids.

    ``fixtures`` are the names of the fixtures that hold a planned cell.
    """
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
    session.recording.add_undeclared(results)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_UNDECLARED] = [result.model_dump_json() for result in results]


def receive_undeclared(config: pytest.Config, session: Session | None, output: Mapping[str, Any]) -> None:
    """Take the records from a worker's ``output``. Without a test, the controller has no session."""
    if output.get(_NOTHING_PLANNED):
        _say(config, _NOTHING_PLANNED, NOTHING_PLANNED)
    records = [record_of(line.encode()) for line in output.get(_UNDECLARED, ())]
    results = [record for record in records if isinstance(record, Result)]
    if not results:
        return
    if session is not None:
        session.recording.add_undeclared(results)
    else:
        _say(config, _UNDECLARED, nothing_to_run(results))


def _say(config: pytest.Config, name: str, sentence: str) -> None:
    if not config.pluginmanager.has_plugin(name):
        config.pluginmanager.register(_LastWord(sentence), name)


class _LastWord:
    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self._sentence)
