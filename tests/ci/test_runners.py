"""The ready-made CI files call README's commands, and are valid."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNERS = ("github-actions.yml", "gitlab-ci.yml", "buildkite.yml")


def commands_of_the_readme():
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    return [line for line in lines if line.startswith("python3 -m venv .venv && ")][:2]


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_calls_both_commands_publishes_the_report_and_keeps_the_run(name):
    text = (ROOT / "ci" / name).read_text()
    main, tests = commands_of_the_readme()
    begin, _, _ = main.partition(" 8")
    assert begin in text
    assert tests in text
    assert "reports/latest/report.md" in text
    assert re.search(r"(path|paths|artifact_paths):.*reports/", text)


def test_the_nightly_installs_as_the_readme_does_and_shows_the_report():
    text = (ROOT / "ci" / "slurm_nightly.sh").read_text()
    install, _, _ = commands_of_the_readme()[0].rpartition(" && ")
    assert install in text
    assert "reports/latest/report.md" in text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = sorted((ROOT / "ci").glob("*.sh"))
    assert scripts
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
