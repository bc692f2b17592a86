"""A format needs one module and one line, also outside of Plumbline."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from plumbline.cli.main import main
from plumbline.report.formats import ENTRY_POINTS, FORMATS, ReportFormat, format_names, report_format, write_report
from plumbline.results.run import Run


def outcomes_of(run: Run) -> str:
    return json.dumps([result.outcome.value for result in run.results])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of a format in a user's module."""
    somebody_elses = ModuleType("somebody_elses_report")
    somebody_elses.FORMAT = ReportFormat("outcomes alone", outcomes_of, {"outcomes.json": outcomes_of})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebody_elses_report", somebody_elses)
    return "somebody_elses_report:FORMAT"


@pytest.mark.parametrize("how", ["a line", "an entry point"])
def test_a_format_of_another_package_works_as_those_that_ship(
    recorded_run: Path, module: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "a line":
        monkeypatch.setitem(FORMATS, "outcomes", module)
    else:
        entry = importlib.metadata.EntryPoint("outcomes", module, ENTRY_POINTS)
        monkeypatch.setattr(
            "plumbline.report.formats.entry_points", lambda group: [entry] if group == entry.group else []
        )
    assert format_names()[-1] == "outcomes"
    assert main(["report", str(recorded_run), "--format", "outcomes"]) == 0
    assert "passed" in json.loads(capsys.readouterr().out)
    write_report(recorded_run)
    assert "passed" in json.loads((recorded_run / "outcomes.json").read_text())


def test_every_format_of_the_registry_is_there() -> None:
    files = [file for name in format_names() for file in report_format(name).files]
    assert sorted(files) == sorted({"report.html", "report.md", "support.md", "support.csv", "metrics.csv"})
    assert all(report_format(name).description for name in format_names())
