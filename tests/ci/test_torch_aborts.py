"""Commands of the nightly programs that torch may abort after all their work is done."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from torch_aborts import MOST_RUNS, despite_aborts


@dataclass
class Ended:
    code: int | None
    output: str = ""


def runs(*ends):
    """Return a function that ends in these ways, one after another, and the list of the remaining ones."""
    left = list(ends)
    return (lambda: left.pop(0)), left


@pytest.mark.parametrize(
    "ended",
    [Ended(1, "exitcode  : -6 (pid: 9)  (SIGABRT)"), Ended(-6), Ended(None)],
    ids=["a rank aborted", "it aborted", "it hung"],
)
def test_what_torch_ended_is_run_again(ended):
    run, left = runs(ended, Ended(0, "done"))
    assert despite_aborts(run).output == "done"
    assert not left


@pytest.mark.parametrize("ended", [Ended(0), Ended(0, "a SIGABRT was survived"), Ended(1, "Traceback: ValueError")])
def test_whatever_else_fails_is_a_failure_at_once(ended):
    run, left = runs(ended, Ended(0, "again"))
    assert despite_aborts(run) is ended
    assert left


def test_what_aborts_every_time_is_a_failure():
    run, left = runs(*[Ended(-6)] * MOST_RUNS, Ended(0))
    assert despite_aborts(run).code == -6
    assert len(left) == 1


def test_launchers_name_the_signal_of_a_rank():
    script = "import os, sys; sys.exit(0) if os.environ['RANK'] == '1' else os.abort()"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable]
    ended = subprocess.run([*launcher, "-c", script], capture_output=True, text=True, check=False)
    run, left = runs(Ended(ended.returncode, ended.stdout + ended.stderr), Ended(0, "done"))
    assert despite_aborts(run).output == "done"
    assert not left
