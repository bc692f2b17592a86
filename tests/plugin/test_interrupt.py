"""Ctrl-C ends a run with the command that goes on with it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

CELLS = ("--gpus", "2", "--workloads", "mlp", "--precisions", "32")
INTERRUPTED = """
import os, signal
from harness.results.run_writer import RunWriter
write, left = RunWriter.write, [2]
def interrupting(self, *records):
    write(self, *records)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGINT)
RunWriter.write = interrupting
"""


def test_the_command_that_is_printed_goes_on_with_the_run(project):
    (project.root / "elsewhere").mkdir()
    (project.root / "elsewhere" / "interrupted.py").write_text(INTERRUPTED)
    asked = ("suites/", *CELLS, "--report-dir", "my reports")
    variables = {**os.environ, "PYTEST_PLUGINS": "interrupted", "PYTHONPATH": str(project.root / "elsewhere")}
    command = [sys.executable, "-m", "pytest", *asked]
    settings = {"cwd": project.root, "capture_output": True, "text": True, "timeout": project.hangs_after}
    done = subprocess.run(command, env=variables, **settings)
    assert done.returncode == 2
    _, _, said = done.stdout.partition("interrupted after 2 of 5 cells; resume with:\n")
    printed = said.splitlines()[0].strip()
    assert shlex.split(printed)[-len(asked) - 1 :] == [*asked, "--resume"]
    before = project.run_in("my reports")
    assert before.footer is None

    done = subprocess.run(printed, shell=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume with" not in done.stdout
    after = project.run_in("my reports")
    assert after.name == before.name
    assert after.footer is not None
    assert len({result["cell"] for result in after.results}) == 5
