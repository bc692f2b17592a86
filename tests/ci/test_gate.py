"""The gate names every backend, and fails if none of its cells was trained; `.ci/run` ends with README's tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from plumbline.core.training_behavior import of_accelerator
from plumbline.subjects.load import SHORT_NAMES, load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "reports" / "example-simulated"


@pytest.fixture
def gate(program):
    return program(ROOT / "ci" / "gate.py")


@pytest.mark.parametrize("subject", ["reference", "torch"])
def test_every_backend_that_a_subject_of_ours_declares_for_simulated_devices_is_named(gate, subject):
    declared = {name for one in load(subject) if of_accelerator(one.precisions, "cpu") for name in one.backends}
    named = {name for claim in gate.CLAIMS.values() if claim.subject == subject for name in claim.backends}
    assert named == declared


@pytest.fixture
def trained_elsewhere(gate, monkeypatch):
    """A gate whose runs are all the kept example: it has cells with none, dp and ddp, but not with pp."""
    monkeypatch.setattr(gate, "run", lambda command, **options: "")
    monkeypatch.setattr(gate, "in_own_environment", lambda name: name)
    monkeypatch.setattr(gate, "read_run", lambda path, read=gate.read_run: read(EXAMPLE))
    return gate


def test_a_backend_that_nobody_trained_is_not_green(trained_elsewhere):
    counts, known = trained_elsewhere.conformance(trained_elsewhere.Claim("reference", ("none", "ddp"), 8))
    assert min(counts.values()) > 0
    assert known == 0
    with pytest.raises(trained_elsewhere.GateError, match=r"no cell was trained with pp$"):
        trained_elsewhere.conformance(trained_elsewhere.Claim("reference", ("ddp", "pp"), 8))


def test_a_library_none_of_whose_expected_failures_is_met_is_not_green(trained_elsewhere):
    with pytest.raises(trained_elsewhere.GateError, match="no expected failure of lightning"):
        trained_elsewhere.release("lightning", "accumulation")


def test_a_stage_that_fails_stops_none_of_the_others_and_makes_the_gate_red(gate, monkeypatch, capsys):
    def bad():
        raise gate.GateError("three cells are errored")

    monkeypatch.setattr(gate, "stages", lambda: {"bad": bad, "good": lambda: "four cells"})
    assert gate.main([]) == 1
    table = capsys.readouterr().out.partition("The gate:")[2]
    assert re.search(r"bad .* FAILED +three cells are errored", table)
    assert re.search(r"good .* ok +four cells", table)
    assert gate.main(["--only", "good"]) == 0


def test_a_command_with_another_exit_code_fails_its_stage(gate, capfd):
    with pytest.raises(gate.GateError, match="exit code 3 instead of 0: sh -c"):
        gate.run(["sh", "-c", "echo shown; exit 3"])
    assert "shown" in capfd.readouterr().out
    assert gate.run(["sh", "-c", "exit 1"], code=1) == ""


def test_the_releases_of_the_gate_are_those_that_expected_failures_were_measured_with(gate):
    for name in gate.RELEASED:
        assert name in SHORT_NAMES
        entries = (ROOT / "suites" / "expectations" / f"{name}.toml").read_text()
        assert f'"{name} {gate.pinned(name)}' in entries


def test_what_is_pinned_for_releases_is_not_pinned_twice(gate):
    def names(file):
        return {line.partition("==")[0] for line in (ROOT / file).read_text().splitlines() if "==" in line}

    assert not names("ci/released-constraints.txt") & names("constraints.txt")


@pytest.fixture
def ci_run(tmp_path):
    """Run `.ci/run` with stand-ins for its programs, some of which fail; return its exit code and its lines."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())

    def run(*failing):
        for name in ("python3", "pip", "ruff", "mypy", "vermin", "lint-imports", "python", "pytest"):
            said = "1 passed in 0.1s" if name == "pytest" else ""
            (programs / name).write_text(f"#!/bin/sh\necho {name} $*\necho {said}\nexit {int(name in failing)}\n")
            (programs / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines()

    return run


def test_ci_run_runs_the_gate_and_ends_with_the_test_command_of_the_readme(ci_run):
    code, lines = ci_run()
    readme = next(line for line in (ROOT / "README.md").read_text().splitlines() if "pytest tests/" in line)
    assert code == 0
    assert "python ci/gate.py" in lines
    assert lines.index("python ci/gate.py") < lines.index(readme.rpartition(".venv/bin/")[2])
    assert lines[-1] == "1 passed in 0.1s"
    assert not any("FAILED" in line for line in lines)


@pytest.mark.parametrize("program", ["ruff", "python", "pytest"])
def test_ci_run_is_red_if_anything_failed_and_repeats_what_failed_after_the_tests(ci_run, program):
    code, lines = ci_run(program)
    assert code == 1
    assert lines[-1] == "1 passed in 0.1s"
    after = lines[next(n for n, line in enumerate(lines) if line.startswith("pytest tests/")) :]
    said = next(n for n, line in enumerate(after) if line.startswith("A stage failed: ") and f"/{program} " in line)
    assert after[said + 1].startswith(program)
    table = after[after.index("All stages:") :]
    assert all(("FAILED" in line) == (f"/{program} " in line) for line in table[1:-1])


def test_ci_run_stops_where_the_environment_cannot_be_made(ci_run):
    code, lines = ci_run("pip")
    assert code == 1
    assert "python ci/gate.py" not in lines
