"""The quick faults, injected for real: each is reported correctly, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "ci" / "faults.py")]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults are injected with what Linux has")


def test_quick_faults_are_seen_and_leave_nothing(tmp_path):
    page = tmp_path / "faults.md"
    done = subprocess.run(
        [*COMMAND, "--quick", "--times", "1", "--report", str(page)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and "fault" not in line]
    assert len(rows) >= 10


def test_a_name_that_is_none_is_answered():
    done = subprocess.run(
        [*COMMAND, "--only", "no-such-fault"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert "--list" in done.stdout
