"""``--resume`` continues a run whose process was killed, and shows which cells were known before."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CELLS = ("--gpus", "2", "--workloads", "mlp,linear-exact", "--precisions", "32")
KILLED_AFTER = """
import os, signal
from plumbline.results.run_writer import RunWriter
write, left = RunWriter.write, [{cells} + 1]  # the header is written first
def killing(self, *records):
    write(self, *records)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
RunWriter.write = killing
"""


def killed_after(project, cells, *arguments):
    """Run pytest until ``cells`` cells are written; then its process sends itself SIGKILL."""
    (project.root / "killer.py").write_text(KILLED_AFTER.format(cells=cells))
    command = [sys.executable, "-m", "pytest", "-p", "killer", "suites/", *arguments]
    limit = project.hangs_after
    ended = subprocess.run(command, cwd=project.root, capture_output=True, timeout=limit, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stdout.decode()[-2000:]


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_killed_run_goes_on_where_it_was(project, xdist):
    wrong = project.trainer("doubled.py", factor="job.world_size")
    asked = (*CELLS, "--subject", wrong, *xdist)
    killed_after(project, 5, *asked)
    before = project.run
    assert before.footer is None
    ended = {result["cell"] for result in before.results}
    assert len(ended) == 5

    result = project.pytest(*asked, "--resume", fresh=True)
    after = project.run
    assert after.name == before.name
    assert after.lines[: len(before.lines)] == before.lines, "nothing that was reported is lost or said twice"
    declared = {found["cell"] for found in after.results if found["outcome"] != "unsupported"}
    assert declared == {cell["cell"] for cell in after.lines[0]["planned"]}
    cells = [found["cell"] for found in after.results if found["outcome"] == "unsupported"]
    assert len(cells) == len(set(cells)) == 2, "what is not declared is recorded once"
    assert after.footer is not None
    assert result.ret == 1, "what failed before still fails"
    result.stdout.fnmatch_lines(["*as recorded before*"])


def test_only_the_run_that_was_asked_for_is_gone_on_with(project):
    assert project.pytest("--resume", "reports/nowhere", *CELLS).ret == 4
    killed_after(project, 1, *CELLS)
    result = project.pytest("--resume", *CELLS, "--seed", "5")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*other options (seed)*"])


def test_a_whole_run_is_not_gone_on_with(project):
    asked = ("--gpus", "1", "--workloads", "mlp", "--precisions", "32")
    assert project.pytest(*asked).ret == 0
    result = project.pytest(*asked, "--resume")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*is already complete*"])
