"""Traces that ``pytest --keep-traces`` leaves can be judged again, with the same result."""

from __future__ import annotations

import shutil
from pathlib import Path

from plumbline.cli.main import main

SUITES = Path(__file__).parents[2] / "suites"


def test_a_run_of_the_suite_is_judged_again(pytester, one_thread, capsys):
    shutil.copytree(SUITES, Path(pytester.path) / "suites", ignore=shutil.ignore_patterns("__pycache__"))
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
    selection = ("--gpus=2", "--workloads=mlp,cnn-batchnorm", "--precisions=32,16", "--subject=torch", "--seed=5")
    outcome = pytester.runpytest_subprocess("suites", "--keep-traces", *selection, timeout=600)
    assert outcome.ret == 0
    capsys.readouterr()
    assert main(["judge", str(Path(pytester.path) / "reports" / "latest")]) == 0
    said = capsys.readouterr().out
    assert " 0 changed; 0 could not be" in said
    assert not said.startswith("0 cells")
