"""The promises that the project makes about itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_importing_the_plugin_does_not_import_anything_heavy():
    heavy = ("torch", "pandas", "pydantic")
    code = f"import plumbline.pytest_plugin.plugin, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
