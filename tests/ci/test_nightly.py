"""The nightly command: its stages, and that one which fails stops none of the others."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nightly(monkeypatch, tmp_path):
    loader = importlib.machinery.SourceFileLoader("ci_nightly", str(ROOT / "ci" / "nightly"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("ci_nightly", loader))
    monkeypatch.setitem(sys.modules, "ci_nightly", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "REPORT", tmp_path)
    return module


def test_every_test_and_the_whole_detection_suite_are_in_it(nightly):
    commands = {stage.name: list(stage.command) for stage in nightly.stages(2)}
    tests = commands["tests"]
    assert tests[tests.index("tests/") + 1 :][:2] == ["-m", ""], "what is deselected by default runs here"
    assert "suites/detection" in commands["detection"]
    assert not {"-k", "-x"} & set(commands["detection"])


def test_a_stage_that_fails_stops_none_of_the_others(nightly, monkeypatch, capsys):
    stages = [
        nightly.Stage("bad", ["sh", "-c", "echo why; exit 2"]),
        nightly.Stage("elsewhere", ["sh", "-c", "exit 3"], cannot=3),
        nightly.Stage("lacking", ["true"], needs=["no_such_module"]),
        nightly.Stage("good", ["true"]),
    ]
    monkeypatch.setattr(nightly, "stages", lambda workers: stages)
    assert nightly.main([]) == 1
    table = capsys.readouterr().out
    for words in (
        "bad | failed (2)",
        "elsewhere | not possible",
        "lacking | not begun: no_such_module",
        "good | passed",
    ):
        assert words in table
    assert (nightly.REPORT / "bad.log").read_text() == "why\n"
    assert nightly.main(["--only", "good"]) == 0


def test_a_stage_that_there_is_not_is_refused_with_those_that_there_are(nightly, capsys):
    with pytest.raises(SystemExit, match="2"):
        nightly.main(["--only", "detectoin"])
    assert "detection" in capsys.readouterr().err


def test_whatever_runs_at_night_only_is_there():
    """A test that was renamed would run by default again, and nobody would notice why that takes longer."""
    tests = ROOT / "tests"
    lines = (tests / "nightly.txt").read_text().splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        file, _, name = line.removeprefix("!").partition("::")
        assert (tests / file).exists(), line
        assert not name or f"def {name.partition('[')[0]}(" in (tests / file).read_text(), line
