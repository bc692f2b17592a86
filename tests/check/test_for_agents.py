"""docs/for-agents.md: its program reads a verdict as described, and its tables list all possible values."""

from __future__ import annotations

import re
from pathlib import Path

from checked_commands import BROKEN, FOLLOWS, RIGHT, WRONG, checked, training

from plumbline.check.judge.noted import information
from plumbline.check.report.json_file import as_json
from plumbline.check.verdict.verdict import verdict_of
from plumbline.judge.checks import CHECKS
from plumbline.judge.trace_analysis import TraceAnalysis

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "for-agents.md").read_text()


def test_its_program_finds_the_root_of_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = checked(training(WRONG, FOLLOWS, BROKEN, information("rng", "alike")), training(RIGHT))
    (tmp_path / "verdict.json").write_text(as_json(command, verdict_of(command)))
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == f"wrong {[(WRONG.check, WRONG.cause, WRONG.message)]}\n"


def test_it_has_every_check_that_a_verdict_names():
    section = PAGE.partition("## How to go on from a finding")[2]
    named = set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) - {"check"}
    sources = [file.read_text() for file in (ROOT / "harness" / "plumbline" / "check" / "judge").glob("*.py")]
    written = {name for text in sources for name in re.findall(r'^CHECK(?:, \w+)? = "([\w-]+)"', text, re.MULTILINE)}
    assert written <= named
    assert named <= written | {*CHECKS[TraceAnalysis]} | {"clipping"}
