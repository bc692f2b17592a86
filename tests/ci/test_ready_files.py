"""The ready-made CI files are valid for their systems, and their commands run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHECK = [sys.executable, "-m", "check_jsonschema"]
SYSTEMS = {
    "github-actions.yml": ["--builtin-schema", "vendor.github-workflows"],
    "gitlab-ci.yml": ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
    "buildkite.yml": ["--builtin-schema", "vendor.buildkite"],
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_file_is_valid_by_its_system_s_own_schema(name: str) -> None:
    done = subprocess.run([*CHECK, *SYSTEMS[name], ROOT / "ci" / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_github_does_not_take_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "github-actions.yml"
    file.write_text((ROOT / "ci" / file.name).read_text().replace("runs-on:", "runs-at:", 1))
    done = subprocess.run([*CHECK, *SYSTEMS[file.name], file], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout


def parts(name: str) -> list[list[str]]:
    """Return the commands of each job of a file: first those that must succeed, then one that always runs."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "ci" / name).read_text())
    if name == "buildkite.yml":
        return [[step["command"].replace("$$", "$")] for step in content["steps"]]
    if name == "gitlab-ci.yml":
        return [[*job["script"], *job.get("after_script", [])] for job in content.values()]
    return [[step["run"] for step in job["steps"] if "run" in step] for job in content["jobs"].values()]


def on_this_machine(command: str) -> str:
    """Return a command of the main job, changed to two simulated devices and the smoke cells."""
    for matrix in ("${{ matrix.gpus }}", "{{matrix}}", '"$GPUS"'):
        command = command.replace(matrix, "2")
    return command.replace("--accelerator cuda", "--accelerator cpu -m smoke -q")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is this one: creating it and installing into it do nothing."""
    for name in ("suites", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for module, name in (("pytest", "pytest"), ("plumbline.cli.main", "plumbline")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
    (programs / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "path" / "buildkite-agent").write_text('#!/bin/sh\ncat > "annotation.md"\n')
    for program in (*programs.iterdir(), *(tmp_path / "path").iterdir()):
        program.chmod(0o755)
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_file_runs_leaves_a_report(checkout: Path, name: str) -> None:
    main, _ = parts(name)
    environment = {
        **os.environ,
        "PATH": f"{checkout / 'path'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(checkout / "summary.md"),
    }
    for command in map(on_this_machine, main):
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "reports" / "latest" / "report.html").is_file()
    shown = {"github-actions.yml": "summary.md", "gitlab-ci.yml": "report.md", "buildkite.yml": "annotation.md"}
    assert (checkout / shown[name]).read_text().startswith("# ")
    if name == "gitlab-ci.yml":
        assert 'name="command"' in (checkout / "junit.xml").read_text()
