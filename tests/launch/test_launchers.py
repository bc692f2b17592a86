"""A launcher from outside the package needs one class and one line in the registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.core.errors import PlanError
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launchers import LAUNCHERS, find_launcher
from plumbline.launch.pool import Launcher, LauncherOptions, Pool
from plumbline.results.run import read_run

ROOT = Path(__file__).parents[2]

PLUGIN = """
from plumbline.launch.launchers import LAUNCHERS
from plumbline.launch.pool import Launcher
from plumbline.launch.pool import Pool

class Elsewhere(Launcher):
    def pool(self, locator, python):
        return Pool(locator, python, self._notify)

LAUNCHERS["elsewhere"] = Elsewhere
"""


class Elsewhere(Launcher):
    """Launches on this machine, and notes the subjects."""

    own_options = frozenset({"node_command"})

    def __init__(self, options: LauncherOptions) -> None:
        super().__init__(options)
        self.locators: list[str] = []

    def pool(self, locator: str, python: str | None) -> Pool:
        self.locators.append(locator)
        return Pool(locator, python)


def test_one_that_is_registered_trains_and_reads_its_own_options_only(monkeypatch, cell_of, tmp_path):
    monkeypatch.setitem(LAUNCHERS, "elsewhere", Elsewhere)
    launcher = find_launcher("elsewhere", LauncherOptions(node_command="ssh {node}"))
    pool = launcher.pool("torch", None)
    try:
        assert launch(pool, cell_of("mlp", "ddp", "1x2", subject="torch"), tmp_path, Settings(600.0)).is_whole
    finally:
        pool.close()
    assert launcher.locators == ["torch"]
    with pytest.raises(PlanError, match="--rendezvous is for --launcher torchrun, not for elsewhere"):
        find_launcher("elsewhere", LauncherOptions(rendezvous="here:1"))


def test_a_name_that_is_not_registered_is_refused_with_the_next_one():
    with pytest.raises(PlanError, match="unknown launcher 'slrum': did you mean 'slurm'"):
        find_launcher("slrum")


def test_a_run_takes_one_that_a_plugin_has_registered(tmp_path):
    (tmp_path / "elsewhere.py").write_text(PLUGIN)
    options = ["--launcher", "elsewhere", "--gpus", "1", "--workloads", "linear-exact", "--precisions", "32"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "elsewhere"]
    done = subprocess.run(
        [*pytest_, *options, "--report-dir", tmp_path, ROOT / "suites" / "conformance"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(tmp_path / "latest")
    assert run.header.options["launcher"] == "elsewhere"
    assert run.results
