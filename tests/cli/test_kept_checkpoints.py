"""An interrupted training has three launches: all their evidence is kept, and judged again with the same result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plumbline.cli.main import main
from plumbline.engine.rejudge import rejudge
from plumbline.results.run import line_of, read_run

ROOT = Path(__file__).parents[2]
DETECTION = ROOT / "suites" / "detection" / "everybody.py"


@pytest.fixture
def run(pytester, one_thread):
    """Return the folder of a run of the suite with a trainer that loses its optimizer state."""
    shutil.copytree(ROOT / "suites", Path(pytester.path) / "suites", ignore=shutil.ignore_patterns("__pycache__"))
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
    selection = ("--gpus=2", "--backends=ddp", "--workloads=checkpoint,checkpoint-elastic,mlp", "--precisions=32,16")
    subject = f"--subject={DETECTION}::optimizer-state-dropped"
    outcome = pytester.runpytest_subprocess("suites", subject, *selection, timeout=600)
    assert outcome.ret == 1
    return Path(pytester.path) / "reports" / "latest"


def test_a_failing_checkpoint_is_judged_again_byte_for_byte(run, capsys):
    """Passed cells kept nothing; each of the three that failed kept all its launches."""
    kept = sorted(folder.name for folder in (run / "traces").iterdir())
    assert [name.partition("dropped-")[2] for name in kept] == [
        "checkpoint-ddp-1x2-16", "checkpoint-ddp-1x2-32", "checkpoint-elastic-ddp-1x2-32",
    ]  # fmt: skip
    for name in kept:
        for part in (".", "saved", "resumed"):
            assert list((run / "traces" / name / part).glob("rank-*.safetensors"))
    cells = rejudge(read_run(run))
    assert len(cells) == 3
    for cell in cells:
        found = {result.check: result for result in cell.now}["checkpoint"]
        assert (found.outcome, found.family, found.cause) == ("failed", "checkpoint", "optimizer-state-dropped")
        assert b"".join(map(line_of, cell.now)) == b"".join(map(line_of, cell.recorded))
    assert main(["judge", str(run)]) == 0
    assert "3 cells judged again: 3 unchanged, 0 changed" in capsys.readouterr().out
