"""The project's promises about itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_walls_between_the_parts_stand():
    lint = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_ci_runs_the_test_command_that_the_readme_gives():
    readme = (ROOT / "README.md").read_text()
    (command,) = [line.strip() for line in readme.splitlines() if "pytest tests/" in line]
    setup, _, test = command.rpartition(" && ")
    ci = (ROOT / ".ci" / "run").read_text()
    assert setup in ci
    assert test in ci


def test_nothing_makes_an_array_of_numpy_where_only_torch_may_be():
    """Calls that need numpy without importing it, which import contracts cannot see."""
    for path in (ROOT / "harness" / "plumbline").rglob("*.py"):
        assert not re.search(r"\.numpy\(|from_numpy\(", path.read_text()), path


def test_importing_the_plugin_does_not_import_anything_heavy():
    heavy = ("torch", "pandas", "pydantic")
    code = f"import plumbline.pytest_plugin.plugin, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        ("From `--gpus 4` to a rank", 14),
        ("From a gradient to its sentence in the report", 18),
        ("From `plumbline check` to its verdict", 18),
    ],
)
def test_a_walk_opens_few_files_and_none_twice(walk, most):
    text = (ROOT / "ARCHITECTURE.md").read_text().partition(f"### {walk}\n")[2].partition("\n#")[0]
    files = re.findall(r"`([\w/]+/\w+\.py)`", text)
    assert len(files) == len(set(files)) <= most
    named = re.findall(r"`([\w.]+)`[^`]*?\s\(`([\w/]+\.py)`", text)
    assert len(named) > len(files) / 2
    for name, file in named:
        code = (ROOT / "harness" / "plumbline" / file).read_text()
        assert all(re.search(rf"\b{part}\b", code) for part in name.split(".")), (name, file)
