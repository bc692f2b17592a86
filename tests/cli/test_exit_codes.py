"""Every command exits with the documented code: 2 if it fails, 4 if the command line is invalid."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.cli.main import COMMANDS, main
from plumbline.machine.software import plumbline_version

EXAMPLE = Path(__file__).parents[2] / "reports" / "example-simulated"

CODES = [
    ("", 4),
    ("--version", 0),
    ("--versoin", 4),
    ("chekc", 4),
    ("check", 4),
    ("check python train.py", 4),
    ("check -- no-such-program", 4),
    ("check --json no/folder/x.json -- python", 4),
    ("check --report-dir taken.py -- python", 4),
    ("compare", 4),
    ("completion tcsh", 4),
    ("compare run", 4),
    ("compare run run", 0),
    ("compare run nowhere", 2),
    ("compare nowhere run", 2),
    ("compare run broken", 2),
    ("compare run run --by backend", 4),
    ("compare run --by subject", 4),
    ("compare run --by backend", 1),
    ("compare nowhere --by backend", 2),
    ("compare --interleave torch", 4),
    ("doctor --fast", 4),
    ("history nowhere", 2),
    ("history", 4),
    ("hunt", 4),
    ("hunt --subject torch --minutes 0", 4),
    ("hunt --subject torch --folder taken.py", 4),
    ("hunt --subject torch --gpus 100000000", 4),
    ("judge nowhere", 2),
    ("judge run", 2),  # the run has no traces
    ("judge run --workload nowhere.py", 4),
    ("new-subject taken.py", 2),
    ("new-subject mine.py", 0),
    ("new-workload taken.py", 2),
    ("new-workload mine.py", 0),
    ("power", 4),
    ("power --subject torch --runs 0", 4),
    ("power --subject torch --gpus 100000000", 4),
    ("report nowhere", 2),
    ("report broken", 2),
    ("report run --format md", 0),
    ("report run --format nope", 4),
    ("report run -o file", 4),
    ("run conformence", 4),
    ("show nowhere mlp", 2),
    ("show run no-such-cell", 2),
    ("show run", 4),
    ("smoke nowhere.py", 4),
    ("smoke torch;pyhton=python3", 4),
    ("subjects install", 4),
    ("submit", 4),
    ("submit --nodes 1 --gpus 2 --engine nope", 4),
    ("submit --nodes 1 --gpus 2 --workloads mlp", 4),
    ("submit --attach nowhere", 2),
]
AFTER_A_START = [
    ("hunt --subject nowhere.py", 4),
    ("power --subject torch --workload nope", 4),
    ("power --subject nowhere.py", 4),
]
"""The same codes of the same commands after a fork server has started, which takes seconds."""


@pytest.fixture
def folder(tmp_path, monkeypatch, one_thread):
    shutil.copytree(EXAMPLE, tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.jsonl").write_text("no header\n")
    (tmp_path / "taken.py").write_text("")
    monkeypatch.chdir(tmp_path)


def code_of(words: str) -> int:
    try:
        return main(words.split())
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("words", "code"),
    [*CODES, *(pytest.param(*row, marks=pytest.mark.nightly) for row in AFTER_A_START)],
    ids=lambda value: str(value) or "nothing",
)
def test_the_code_is_the_documented_one(words, code, folder, capsys):
    assert code_of(words) == code
    if code in (2, 4):
        assert capsys.readouterr().err.strip(), "it says why"


def test_each_command_has_a_row():
    assert {words.split()[0] for words, _ in CODES if words} >= {*COMMANDS}


def test_the_version_is_printed(capsys):
    assert code_of("--version") == 0
    assert capsys.readouterr().out == f"plumbline {plumbline_version()}\n"


def test_an_unknown_option_is_answered_with_the_usage_of_its_command(capsys):
    assert code_of("history reports --html") == 4
    said = capsys.readouterr().err
    assert said.startswith("usage: plumbline history")
    assert "unrecognized arguments: --html" in said


def test_options_of_the_run_that_submit_was_given_are_shown_where_they_belong(capsys):
    assert code_of("submit --nodes 1 --gpus 2 --workloads mlp") == 4
    said = capsys.readouterr().err
    assert said.startswith("usage: plumbline submit")
    assert "put options of the run after `--`" in said
    assert "-- --workloads mlp" in said


def test_python_m_plumbline_is_the_command():
    done = subprocess.run([sys.executable, "-m", "plumbline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"plumbline {plumbline_version()}\n"
