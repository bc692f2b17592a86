"""The ready-made nightly run, unchanged, on a real cluster: only creating the environment is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plumbline.results.run import read_run

ROOT = Path(__file__).parents[2]
MATRIX = ("--workloads", "mlp", "--precisions", "32", "--backends", "none,ddp", "-p", "no:cacheprovider")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is this one: creating it and installing into it do nothing."""
    for name in ("suites", "harness", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = {
        "ci/slurm_nightly.sh": (ROOT / "ci" / "slurm_nightly.sh").read_text(),
        ".venv/bin/plumbline": f'#!/bin/sh\nexec "{sys.executable}" -m plumbline.cli.main "$@"\n',
        ".venv/bin/pip": "#!/bin/sh\n",
        "path/python3": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.usefixtures("cluster")
def test_the_nightly_run_examines_every_cell_on_its_nodes_and_prints_one_screen(checkout: Path) -> None:
    done = subprocess.run(
        [checkout / "ci" / "slurm_nightly.sh", "--nodes", "2", "--gpus", "1", "--accelerator", "cpu",
         "--partition", "main", "--time", "00:10:00", "--", "suites/conformance", *MATRIX],
        cwd="/",
        env={**os.environ, "PATH": f"{checkout / 'path'}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Nothing went wrong in 2 cells." in done.stdout
    run = read_run(checkout / "reports" / "latest")
    assert not run.incomplete
    assert {result.cell for result in run.results} == {"reference-mlp-none-1x1-32", "reference-mlp-ddp-2x1-32"}
