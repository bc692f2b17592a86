"""A suite in an environment with Plumbline: collectives, DDP, DTensor and FSDP2, as other projects test them."""

from __future__ import annotations

import shutil
from pathlib import Path

SUITE = Path(__file__).with_name("foreign")


def test_it_passes(run_pytest, tmp_path):
    for file in SUITE.glob("*.py"):
        shutil.copy(file, tmp_path)
    run = run_pytest(tmp_path)
    assert run.code == 0, run.stdout
    assert len(run.results) >= 25
