"""User-defined workloads in files; what a test registers is removed afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

GOOD = (Path(__file__).parent / "mine.py").read_text()


@pytest.fixture(autouse=True)
def _registered(workloads_as_before):
    """Remove what a test registers."""


@pytest.fixture
def written(tmp_path):
    """Write a file with a right workload; ``changes`` are replacements in it, ``more`` is added to its class."""

    def write(name="mine.py", changes=(), more=""):
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        lines = "".join(f"    {line}\n" if line else "\n" for line in more.strip("\n").splitlines())
        (tmp_path / name).write_text(f"{text}\n{lines}")
        return tmp_path / name

    return write
