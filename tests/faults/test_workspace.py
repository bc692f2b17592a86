"""A run's folder is removed with the run; that of a killed one by the next, and that of a living one by nobody."""

from __future__ import annotations

import signal
import subprocess
import sys

from harness.launch.workspace import Workspace

OWNER = """
import os, signal, sys
from pathlib import Path
from harness.launch.workspace import Workspace
workspace = Workspace.new(Path(sys.argv[1]))
(workspace.folder() / "evidence").write_text("much")
os.kill(os.getpid(), signal.SIGKILL)
"""


def folders(place):
    return list(place.iterdir())


def test_a_workspace_is_removed_when_its_run_leaves_it(tmp_path):
    workspace = Workspace.new(tmp_path)
    assert workspace.folder().parent == workspace.path
    workspace.leave(remove=True)
    assert not folders(tmp_path)


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    killed = subprocess.run([sys.executable, "-c", OWNER, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = folders(tmp_path)
    workspace = Workspace.new(tmp_path)
    assert folders(tmp_path) == [workspace.path]
    assert workspace.path != left
    workspace.leave(remove=True)


def test_what_somebody_uses_stays_also_when_its_maker_has_left_it(tmp_path):
    made = Workspace.new(tmp_path)
    user = Workspace(made.path)
    made.leave(remove=False)
    other = Workspace.new(tmp_path)
    assert made.path in folders(tmp_path)
    user.leave(remove=True)
    other.leave(remove=True)
    assert not folders(tmp_path)
