"""A temporary folder is removed by its user or, if that was killed, by the next one; never while its user lives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.worker.scratch import NODE, RUN, Scratch

OWNER = """
import os, signal, sys
from pathlib import Path
from plumbline.worker.scratch import Scratch
folder = Path(Scratch.new(sys.argv[1], sys.argv[2]).path)
(folder / "cell").mkdir()
(folder / "cell" / "evidence").write_text("much")
(folder / "more").write_text("much")
os.kill(os.getpid(), signal.SIGKILL)
"""

MANY = """
import os, sys
from plumbline.worker.scratch import RUN, Scratch
for _ in range(200):
    scratch = Scratch.new(RUN, sys.argv[1])
    with open(os.path.join(scratch.path, "mine"), "x") as file:
        file.write("mine")
    assert os.listdir(scratch.path).count("mine") == 1
    scratch.leave(remove=True)
"""


def folders(place):
    return list(place.iterdir())


def test_a_workspace_is_removed_when_its_run_leaves_it(tmp_path):
    workspace = Scratch.new(RUN, tmp_path)
    assert Path(workspace.path).parent == tmp_path
    workspace.leave(remove=True)
    assert not folders(tmp_path)


@pytest.mark.parametrize("prefix", [RUN, NODE])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, prefix):
    killed = subprocess.run([sys.executable, "-c", OWNER, prefix, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = folders(tmp_path)
    assert left.name.startswith(prefix)
    workspace = Scratch.new(RUN, tmp_path)
    assert folders(tmp_path) == [Path(workspace.path)]
    workspace.leave(remove=True)


def test_what_was_killed_before_it_had_a_lock_is_removed_and_what_is_not_ours_stays(tmp_path):
    (tmp_path / f"{RUN}young").mkdir()
    somebodys = tmp_path / f"{NODE}of-somebody"
    somebodys.mkdir()
    Scratch.new(NODE, tmp_path).leave(remove=True)
    assert folders(tmp_path) == [somebodys]


def test_what_somebody_uses_stays_also_when_its_maker_has_left_it(tmp_path):
    made = Scratch.new(RUN, tmp_path)
    user = Scratch(made.path)
    made.leave(remove=False)
    other = Scratch.new(RUN, tmp_path)
    assert Path(made.path) in folders(tmp_path)
    user.leave(remove=True)
    other.leave(remove=True)
    assert not folders(tmp_path)


def test_several_at_once_take_nothing_from_each_other(tmp_path):
    several = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(600) for process in several] == [0, 0, 0]
    assert not folders(tmp_path)
