"""Runs of a user's test suite, in its own process and folder, with the installed plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore = ["foreign"]  # test_foreign_suite.py runs it like its owner
# An installation from before the entry point existed has to name the plugin.
INSTALLED = any(point.name == "plumbline-ranks" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "plumbline.pytest_ranks.plugin")


@dataclass(frozen=True)
class Result:
    """One test of a run: ``passed``, ``failure``, ``error`` or ``skipped``, with its message."""

    outcome: str
    message: str
    text: str


@dataclass(frozen=True)
class Run:
    """A pytest run: its exit code, its output, and its tests by name."""

    code: int
    stdout: str
    results: dict[str, Result]

    def __getitem__(self, name: str) -> Result:
        return self.results[name]


def command(*arguments: str) -> list[str]:
    """Return a command that runs pytest as a user does, without this project's settings."""
    return [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "--color=no", *arguments]


def run_pytest(folder: Path, *arguments: str) -> Run:
    report = folder / "report.xml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    done = subprocess.run(
        [*command(*arguments), f"--junitxml={report}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    results = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        (found, *_) = [one for one in case if one.tag in ("failure", "error", "skipped")] or [None]
        outcome, message, text = ("passed", "", "")
        if found is not None:
            outcome, message, text = found.tag, found.get("message", ""), found.text or ""
        results[case.get("name", "")] = Result(outcome, message, text)
    return Run(done.returncode, done.stdout + done.stderr, results)


@pytest.fixture(name="command", scope="session")
def _command():
    return command


@pytest.fixture(name="run_pytest", scope="session")
def _run_pytest():
    return run_pytest


@pytest.fixture
def users(tmp_path):
    """Return a function that runs a user's test file with pytest."""

    def run(source: str, *arguments: str) -> Run:
        (tmp_path / "test_own.py").write_text(source)
        return run_pytest(tmp_path, *arguments)

    return run


@pytest.fixture(scope="session")
def bodies(tmp_path_factory) -> Run:
    """The run of ``bodies.py``, shared by all tests that check it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "test_bodies.py").write_text((HERE / "bodies.py").read_text())
    return run_pytest(folder, "-rA", "test_bodies.py")
