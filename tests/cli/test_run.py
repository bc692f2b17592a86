"""``plumbline run``, and commands in messages: they work in the folder where they are printed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from plumbline.cli.main import main
from plumbline.core.invocation import command, suites

SCRIPTS = Path(sys.executable).parent


def test_a_suite_that_there_is_not_is_a_usage_error(capsys):
    assert main(["run", "conformence", "--gpus", "2"]) == 4
    assert "did you mean conformance?" in capsys.readouterr().err


def test_help_lists_the_options_of_the_suites(capsys):
    assert main(["run", "--gpus", "2", "--help"]) == 0
    said = capsys.readouterr().out
    assert "[SUITE ...] [OPTIONS]" in said
    assert "--precisions A,B" in said


def test_a_program_is_named_by_its_name_only_where_path_leads_to_it(tmp_path, monkeypatch):
    """A machine may have another pytest on its PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["elsewhere"])
    monkeypatch.setenv("PATH", str(SCRIPTS))
    assert command("pytest", "a b") == "pytest 'a b'"
    other = tmp_path / "other" / "pytest"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{SCRIPTS}")
    assert command("pytest") == shlex.quote(str(SCRIPTS / "pytest"))
    monkeypatch.chdir(SCRIPTS.parent)
    assert command("pytest") == f"{SCRIPTS.name}/pytest"


def test_without_a_script_a_program_is_run_as_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["elsewhere"])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("plumbline", "run") == f"{python} -m plumbline.cli.main run"
    assert command("make", "it") == "make it", "what is not ours is left alone"


def test_messages_name_the_suites_as_they_are_reached(tmp_path):
    for folder, words in ((suites().parent, "pytest suites/ "), (tmp_path, "plumbline run ")):
        code = "from plumbline.core.invocation import suite_command as c; import shlex"
        code += "; print(shlex.join(c('--subject', 'x')))"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.endswith(f"{words}--subject x\n")
