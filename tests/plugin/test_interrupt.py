"""Ctrl-C ends a run with the command that resumes it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

CELLS = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32")
INTERRUPTED = """
import os, signal
from plumbline.results.run_writer import RunWriter
write, left = RunWriter.write, [3]  # the header and two cells
def interrupting(self, *records):
    write(self, *records)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGINT)
RunWriter.write = interrupting
"""
WHILE_PLANNING = """
import os, signal
from plumbline.engine.subject_pools import SubjectPools
load = SubjectPools.__init__
def interrupted(self, *arguments):
    load(self, *arguments)
    if not os.path.exists("interrupted"):
        open("interrupted", "x").close()
        os.kill(os.getpid(), signal.SIGINT)
SubjectPools.__init__ = interrupted
"""


def test_a_run_that_was_interrupted_before_its_first_cell_can_be_resumed_or_begun_again(project):
    (project.root / "interrupting.py").write_text(WHILE_PLANNING)
    few = ("--gpus", "1", "--workloads", "mlp", "--precisions", "32")
    interrupted = project.pytest("-p", "interrupting", *few, fresh=True)
    assert interrupted.ret == 2
    interrupted.stdout.fnmatch_lines(
        ["interrupted before the first cell; start again with:", "*-p interrupting*--gpus 1*--precisions 32"]
    )
    assert not (project.root / "reports").exists()

    resumed = project.pytest("--resume", *few)
    assert resumed.ret == 0
    resumed.stderr.fnmatch_lines(["*reports has no run to resume; beginning a new one"])
    assert len({result["cell"] for result in project.run.results}) == 1
    assert project.run.footer is not None


def test_the_command_that_is_printed_goes_on_with_the_run(project):
    (project.root / "elsewhere").mkdir()
    (project.root / "elsewhere" / "interrupted.py").write_text(INTERRUPTED)
    asked = ("suites/", *CELLS, "--report-dir", "my reports")
    variables = {**os.environ, "PYTEST_PLUGINS": "interrupted", "PYTHONPATH": str(project.root / "elsewhere")}
    command = [sys.executable, "-m", "pytest", *asked]
    settings = {"cwd": project.root, "capture_output": True, "text": True, "timeout": project.hangs_after}
    done = subprocess.run(command, env=variables, **settings)
    assert done.returncode == 2
    before = project.run_in("my reports")
    planned = len(before.lines[0]["planned"])
    _, _, said = done.stdout.partition(f"interrupted after 2 of {planned} cells; resume with:\n")
    printed = said.splitlines()[0].strip()
    assert shlex.split(printed)[-len(asked) - 1 :] == [*asked, "--resume"]
    assert before.footer is None

    done = subprocess.run(printed, shell=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume with" not in done.stdout
    after = project.run_in("my reports")
    assert after.name == before.name
    assert after.footer is not None
    assert len({result["cell"] for result in after.results}) == planned
